"""What is written from elsewhere is fresh, and says what stands there."""

import ast
from pathlib import Path

import pytest

from kfp_ddp import reference
from kfp_ddp.checks.preflight.parameters import SUBJECTS


def test_everything_that_is_made_from_elsewhere_is_fresh(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert reference.main(["--check"]) == 0, capsys.readouterr().out


def test_a_new_box_of_the_form_becomes_an_input_of_preflight() -> None:
    form = reference.FORM.read_text().replace(
        "    epochs: int = 0,\n", "    epochs: int = 0,\n    momentum: float = 0.0,\n"
    )
    made = reference.preflight(form, reference.PREFLIGHT.read_text())
    assert "    epochs: int = 0,\n    momentum: float = 0.0,\n" in made
    assert "\n        momentum: Nesterov momentum" in made
    ast.parse(made)


def test_a_box_that_no_model_tells_of_is_refused() -> None:
    form = reference.FORM.read_text().replace("    epochs: int", "    momentom: int")
    with pytest.raises(LookupError):
        reference.preflight(form, reference.PREFLIGHT.read_text())


def test_a_row_tells_bounds_choices_and_default() -> None:
    rows = reference.settings_table("datasets.settings.SyncSettings")
    told = {row.split("`")[1]: row for row in rows[2:]}
    assert told["max_delete"].startswith("| `max_delete` | float, ≥ 0, ≤ 1 | `0.5` | ")
    assert "| `list`, `quick`, `full` | `list` |" in told["verify"]
    assert "mirror" not in told, "the step sets it itself"


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_setting_of_a_mapping_stands_in_a_table(subject: str) -> None:
    written = "".join(
        path.read_text() for name in reference.DOCUMENTS for path in reference.ROOT.glob(name)
    )
    for model in SUBJECTS[subject]:
        own = model.own if subject != "job" else {"kind"}
        for name in set(model.model_fields) - own:
            assert f"| `{name}` | " in written, (model, name)


def test_stale_text_is_named_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- inputs: gate -->\nold\n<!-- /inputs -->\nb\n")
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    monkeypatch.setattr(reference, "DOCUMENTS", ("README.md",))
    monkeypatch.setattr(reference, "PREFLIGHT", readme)
    monkeypatch.setattr(reference, "preflight", lambda pipeline, component: component)
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


def test_the_options_of_a_command_stand_in_a_table_with_choices_and_defaults() -> None:
    rows = reference.command_tables("install")
    told = {row.split("`")[1]: row for row in rows if row.startswith("| `--")}
    assert told["--claims"].startswith("| `--claims` | `both` | both for train_resnet, data for ")
    assert told["--claims"].endswith(" One of `both`, `data`, `none`. |")
    assert told["--dry-run"].startswith("| `--dry-run` |  | Let the server say")


def test_what_is_set_once_is_told_with_the_variables_that_set_it() -> None:
    rows = reference.once_table("core.config.Config")
    told = {row.split("`")[1]: row for row in rows[2:]}
    assert told["host"].startswith("| `host` | `KFP_DDP_HOST`, `KF_PIPELINES_ENDPOINT` |  | Addr")
    assert "| `kubeflow` |" in told["kfp_namespace"]
