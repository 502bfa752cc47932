"""The wheel that is built from the source distribution, in a new environment."""

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


def test_wheel_has_every_module_and_file_of_the_package(wheel: Path) -> None:
    """The links of kfp_ddp/ are folders in the wheel."""
    root = REPOSITORY / "kfp_ddp"
    files = {
        f"kfp_ddp/{path.relative_to(root).as_posix()}"
        for folder in (root, *(link for link in root.iterdir() if link.is_symlink()))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {"kfp_ddp/training/config.py", "kfp_ddp/report/templates/style.css"} <= files
    assert files - packed == set()


@pytest.mark.slow
def test_wheel_works_in_a_new_environment(wheel: Path, tmp_path: Path) -> None:
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
