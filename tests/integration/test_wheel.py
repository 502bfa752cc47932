"""The wheel that is built from the source distribution, in an environment that is empty."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out)]
    subprocess.run([*build, str(REPOSITORY)], check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_the_wheel_holds_every_module_of_the_tree(wheel: Path) -> None:
    tree = {
        f"kfp_ddp/{path.relative_to(root).as_posix()}"
        for root in (REPOSITORY, REPOSITORY / "kfp_ddp")
        for folder in (
            "components",
            "pipelines",
            "training",
            "compiled",
            "deploy",
            "commands",
            "demo",
            "install",
            "local",
            "report",
        )
        for path in (root / folder).rglob("*")
        if path.is_file() and not (root / folder).is_symlink() and "__pycache__" not in path.parts
    }
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert "kfp_ddp/training/config.py" in packed
    assert "kfp_ddp/report/templates/style.css" in packed
    assert tree - packed == set()


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    probe = "import kfp_ddp.components, kfp_ddp.pipelines, kfp_ddp.training"
    subprocess.run([python, "-c", probe], check=True, cwd=tmp_path)
    program = tmp_path / "venv" / "bin" / "kfp-ddp"
    shown = subprocess.run([program, "--help"], check=True, capture_output=True, text=True)
    assert "Runs on Kubeflow Pipelines:" in shown.stdout
    out = tmp_path / "compiled"
    subprocess.run([program, "compile", "--directory", out], check=True, capture_output=True)
    assert (out / "train_resnet.yaml").exists()
