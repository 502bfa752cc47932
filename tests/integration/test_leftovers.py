"""What processes hold while they run, and leave behind."""

from pathlib import Path
from typing import Any

import pytest
from kfp import compiler, dsl

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.datasets.access import using
from kfp_ddp.datasets.versions import leases_of
from kfp_ddp.evaluation import engine as evaluate
from kfp_ddp.export import engine as export
from kfp_ddp.storage import leases as lease
from tests.local_pipeline import pipeline


@dsl.component(base_image="python:3.11", install_kfp_package=False)  # type: ignore[untyped-decorator]
def _nothing() -> None: ...


@dsl.pipeline(name="nothing")  # type: ignore[untyped-decorator]
def _pipeline() -> None:
    _nothing()


def test_a_local_run_leaves_no_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, compiled = tmp_path / "tmp", tmp_path / "pipeline.yaml"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    compiler.Compiler().compile(_pipeline, str(compiled))
    done = pipeline({}, tmp_path, compiled)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(temporary.glob("kfp-workspace-*"))


def test_a_version_and_a_folder_are_held_for_as_long_as_a_step_runs(tmp_path: Path) -> None:
    version, run_dir = tmp_path / "data/versions/0123456789ab", tmp_path / "work/run/train"
    for folder in (version, run_dir):
        folder.mkdir(parents=True)
    leases = (leases_of(version), RunFolder(run_dir).leases)
    assert leases[0] == tmp_path / "data/.kfsync/leases/0123456789ab"
    with using("run", run_dir, version):
        assert [lease.folder_holders(folder) for folder in leases if folder] == [["run"], ["run"]]
    assert [lease.folder_holders(folder) for folder in leases if folder] == [[], []]


def test_a_folder_that_is_no_version_gets_no_lease(tmp_path: Path) -> None:
    plain = tmp_path / "photos"
    plain.mkdir()
    with using("run", tmp_path / "run", plain):
        pass
    assert list(plain.iterdir()) == []


@pytest.mark.parametrize("module", [evaluate, export])
def test_steps_hold_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: object) -> None:
    run_dir, seen = tmp_path / "run", []

    def look(*_: object) -> None:
        seen.extend(lease.folder_holders(RunFolder(run_dir).leases))
        raise InputError("seen")

    monkeypatch.setattr(module, "evaluate_share" if module is evaluate else "make", look)
    texts = dict.fromkeys(("checkpoint", "dataset_path", "split", "champion"), "x")
    if module is evaluate:
        artifacts = dict.fromkeys(
            ("evaluation_metrics", "confusion_matrix", "evaluation_report", "evaluation_summary")
        )
        more: dict[str, Any] = {"batch_size": 1, "worst": 0, "options": {}, "job": {}}
        more |= {"backend": "local", "image": "trainer", "task_name": "evaluate", "run_id": "r"}
        more |= {"work_dir": "", "task_id": "", "task_config": None}
    else:
        artifacts = dict.fromkeys(("exported_model", "export_summary"))
        more = {"evaluation": "x", "model_name": "x", "release": {}}
        del texts["champion"]
    with pytest.raises(SystemExit, match="seen"):
        module.run(run_dir=str(run_dir), **texts, **artifacts, **more)  # type: ignore[attr-defined]
    assert seen == ["evaluate" if module is evaluate else "export"]
