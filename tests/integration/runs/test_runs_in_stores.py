"""A run's folder in GCS and S3: training, resume, steps and deletion."""

from pathlib import Path

import pytest

from kfp_ddp.core import folders
from kfp_ddp.runs.teardown.engine import InBucket
from kfp_ddp.runs.training_folder import TrainingFolder
from kfp_ddp.runs.workspace import open_workspace
from kfp_ddp.storage import leases
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.training.spec.manifest import MANIFEST, STATE
from tests.checkpoints import save


@pytest.mark.parametrize(("store", "work"), [("emulator", "gs://models"), ("s3", "s3://bucket")])
def test_a_run_is_stored_resumed_and_deleted(
    store: str,
    work: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request.getfixturevalue(store)
    monkeypatch.setenv(folders.SCRATCH_VARIABLE, str(tmp_path))
    work = f"{work}/runs"
    uri = f"{work}/run-1/train"
    folder = open_store(uri)
    leases.mark_begin(folder)
    with leases.bucket_lease(uri, "run-1"), TrainingFolder(uri, 2, every=60.0) as first:
        for step in (10, 20, 30):
            save(first.path, step, bytes(step * 256))
            (first.path / "metrics.jsonl").write_text(f"{step}\n")
            first.finish()
        assert InBucket(work).last().keys() == {"run-1"}
        runs = InBucket(work)
        assert runs.in_use("run-1", lambda run: False)
    folder.delete(f"checkpoints/step-00000030/{MANIFEST}")  # as after an interrupted upload
    with TrainingFolder(uri, 2, every=60.0) as second:
        assert second.resumed == "checkpoints/step-00000020"
        save(second.path, 40, bytes(40 * 256))
        second.finish()
    steps = {name.split("/")[0] for name, _ in open_store(f"{uri}/checkpoints").list("")}
    assert steps == {"step-00000020", "step-00000040"}
    with open_workspace(uri, "evaluate") as task:
        checkpoint = task.download(f"{uri}/checkpoints/step-00000040")
        assert (checkpoint / STATE).stat().st_size == 40 * 256
        assert (task.path / "metrics.jsonl").read_text() == "30\n"
    runs.last()
    assert not runs.in_use("run-1", lambda run: False)
    assert runs.delete("run-1")
    assert list(open_store(work).list("")) == []
