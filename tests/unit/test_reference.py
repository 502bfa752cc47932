"""Generated parts of files are fresh, and the version is defined in one place."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from docs import reference
from kfp_ddp import __version__
from kfp_ddp.checks.form import SUBJECTS
from kfp_ddp.components.preflight.component import preflight
from kfp_ddp.pipelines.train_resnet import train_resnet


def test_generated_parts_are_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main(["--check"]) == 0, capsys.readouterr().out


def test_preflight_has_the_form_of_the_pipeline_as_inputs() -> None:
    inputs = preflight.component_spec.inputs
    form = train_resnet.component_spec.inputs
    assert inputs.keys() >= form.keys() - {"bucket_secret"}
    for name in form.keys() - {"bucket_secret"}:
        assert inputs[name].type == form[name].type, name
        assert inputs[name].default == form[name].default or name in (
            "gate",
            "recipe",
            "pretrained",
        )


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_setting_of_a_mapping_is_in_a_table(subject: str) -> None:
    written = "".join(
        path.read_text() for name in reference.DOCUMENTS for path in reference.ROOT.glob(name)
    )
    for model in SUBJECTS[subject]:
        own = model.own if subject != "job" else {"kind"}
        for name in set(model.model_fields) - own:
            assert f"| `{name}` | " in written, (model, name)


def test_stale_text_is_listed_and_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- inputs: gate -->\nold\n<!-- /inputs -->\nb\n")
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    monkeypatch.setattr(reference, "DOCUMENTS", ("README.md",))
    assert reference.main(["--check"]) == 1
    assert "README.md is stale" in capsys.readouterr().out
    assert "old" in readme.read_text()
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
    text = readme.read_text()
    assert "\nold\n" not in text
    assert "| `accuracy` | float | required | Accuracy of the model" in text
    assert text.startswith("a\n")
    assert text.endswith("\nb\n")


REPOSITORY = Path(__file__).parents[2]


def test_version_is_defined_once() -> None:
    names = subprocess.run(
        [
            *("git", "grep", "-l", "--fixed-strings", __version__, "--"),
            *(":!*.lock", ":!compiled", ":!tests", ":!CHANGELOG.md"),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    texts = {name: (REPOSITORY / name).read_text() for name in names}
    files = [name for name in names if __version__ in reference.IMAGE.sub("", texts[name])]
    assert files == ["kfp_ddp/__init__.py"]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["version"]["path"] == "kfp_ddp/__init__.py"


def test_new_version_reaches_all_references_to_images(monkeypatch: pytest.MonkeyPatch) -> None:
    naming = subprocess.run(
        ["git", "grep", "-lE", r"kfp-ddp/(launcher|trainer):[0-9]", "--", ":!compiled"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert "components/train/component.py" in naming
    monkeypatch.setattr(reference, "__version__", "9.8.7")
    written = {
        path.relative_to(REPOSITORY).as_posix()
        for path, text in reference._documents()
        if "launcher:9.8.7" in text or "trainer:9.8.7" in text
    }
    assert set(naming) <= written
