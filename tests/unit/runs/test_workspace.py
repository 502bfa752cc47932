"""A run's folder in a bucket: checkpoints, and the local folders of trainings and steps."""

import time
from pathlib import Path

import pytest

from kfp_ddp.core import folders
from kfp_ddp.core.errors import InputError, StorageError, UnavailableError
from kfp_ddp.runs import checkpoints
from kfp_ddp.runs.training_folder import FollowedFolder, TrainingFolder
from kfp_ddp.runs.workspace import open_workspace
from kfp_ddp.storage import leases
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.leases import LASTING_SECONDS
from kfp_ddp.storage.store import Store
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.manifest import MANIFEST, STATE, step_dir
from kfp_ddp.training.state import saving
from tests.checkpoints import save
from tests.files import write
from tests.waiting import until

KEEP = 2


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(folders.SCRATCH_VARIABLE, str(tmp_path / "scratch"))
    return tmp_path / "scratch"


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/run-1/train"


@pytest.fixture
def remote(uri: str) -> Path:
    """The folder that stands for the bucket's."""
    return Path(uri.removeprefix("file://"))


@pytest.fixture
def store(uri: str) -> Store:
    return open_store(uri)


def put(store: Store, run_dir: Path, *steps: int) -> None:
    for step in steps:
        folder = save(run_dir, step)
        assert checkpoints.upload(store, f"checkpoints/{folder.name}", folder)


def names(folder: Path) -> list[str]:
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(files)


@pytest.mark.parametrize("damaged", [STATE, MANIFEST])
def test_damage_is_ignored(store: Store, remote: Path, tmp_path: Path, damaged: str) -> None:
    put(store, tmp_path / "a", 9, 10, 20)
    write(remote / "checkpoints/step-00000030" / STATE, "without a manifest")
    file = remote / "checkpoints/step-00000020" / damaged
    file.write_bytes(file.read_bytes().replace(b"2", b"3"))
    assert checkpoints.fetch_newest(store, "checkpoints", tmp_path / "b").endswith("10")
    folder = step_dir(tmp_path / "a/checkpoints", 20)
    assert checkpoints.upload(store, f"checkpoints/{folder.name}", folder)
    assert checkpoints.fetch_newest(store, "checkpoints", tmp_path / "c").endswith("20")


def test_without_a_valid_one_nothing_restarts(store: Store, remote: Path, tmp_path: Path) -> None:
    put(store, tmp_path / "a", 10)
    (remote / "checkpoints/step-00000010" / STATE).write_text("other")
    with pytest.raises(StorageError, match=r"none of the 1 checkpoints"):
        checkpoints.fetch_newest(store, "checkpoints", tmp_path / "b")
    assert (remote / "checkpoints/step-00000010" / MANIFEST).exists()


def test_an_interrupted_upload_leaves_the_earlier_checkpoint(store: Store, tmp_path: Path) -> None:
    put(store, tmp_path / "a", 10, 20)
    again = save(tmp_path / "again", 20, b"the same step of a retry")
    (again / STATE).rename(again / "aside")
    (again / STATE).mkdir()  # which no store accepts
    with pytest.raises((StorageError, InputError, OSError)):
        checkpoints.upload(store, "checkpoints/step-00000020", again)
    assert checkpoints.fetch_newest(store, "checkpoints", tmp_path / "b").endswith("10")
    (again / STATE).rmdir()
    (again / "aside").rename(again / STATE)
    assert checkpoints.upload(store, "checkpoints/step-00000020", again)
    assert not checkpoints.upload(store, "checkpoints/step-00000020", again)


def test_old_and_incomplete_ones_are_removed(store: Store, remote: Path, tmp_path: Path) -> None:
    put(store, tmp_path / "a", 9, 10, 100, 20)
    write(remote / "checkpoints/step-00000015" / STATE, "incomplete")
    (remote / "checkpoints/notes.txt").write_text("of a user")
    checkpoints.prune(store, "checkpoints", KEEP)
    assert {name.partition("/")[0] for name in names(remote / "checkpoints")} == {
        *("step-00000020", "step-00000100", "notes.txt")
    }


def test_a_training_resumes_in_another_pod(uri: str, remote: Path) -> None:
    with TrainingFolder(uri, KEEP, every=60.0) as first:
        assert not first.resumed
        (first.path / "metrics.jsonl").write_text("1\n")
        for step in (10, 20, 30):
            save(first.path, step)
        (first.path / "launcher.heartbeat").touch()
        write(first.path / "logs/failure.json", "{}")
        first.finish()
    assert names(remote) == [
        *("checkpoints/step-00000030/manifest.json", "checkpoints/step-00000030/state.pt"),
        *("logs/failure.json", "metrics.jsonl"),
    ]
    (first.path / "metrics.jsonl").write_text("of a pod that ended between two uploads\n")
    save(first.path, 40)
    with TrainingFolder(uri, KEEP, every=60.0) as second:
        assert second.resumed == "checkpoints/step-00000030"
        assert (second.path / "metrics.jsonl").read_text() == "1\n"
        assert [p.name for p in (second.path / "checkpoints").iterdir()] == ["step-00000030"]
        save(second.path, 40)
        second.finish()
    assert len(names(remote / "checkpoints")) == 2 * KEEP


@pytest.mark.parametrize("saved", [False, True])
def test_a_new_start(uri: str, store: Store, remote: Path, tmp_path: Path, saved: bool) -> None:
    put(store, tmp_path / "a", 900, 1000)
    write(remote / "checkpoints.old-0/step-00000007" / STATE, "of an earlier start")
    with TrainingFolder(uri, KEEP, every=60.0) as first:
        new_start = {"output_dir": str(first.path), "resume": "never", "run_id": "17"}
        saving.begin(TrainConfig.create(data="/d", **new_start), [])
        for step in (10, 20) if saved else ():
            save(first.path, step)
            first.finish()
        first.finish()
    steps = ["step-00000020", "step-00000010"] if saved else []
    complete = checkpoints.complete(store, "checkpoints")
    assert complete == [f"checkpoints/{step}" for step in steps]
    assert checkpoints.complete(store, "checkpoints.old-1") == [
        *("checkpoints.old-1/step-00001000", "checkpoints.old-1/step-00000900")
    ]
    assert (remote / "checkpoints.old-1/step-00000900" / STATE).read_text() == "state 900"
    assert (remote / "checkpoints.old-0/step-00000007" / STATE).exists()
    assert (remote / "begun-by").exists()
    with TrainingFolder(uri, KEEP, every=60.0) as second:
        assert second.resumed == ("checkpoints/step-00000020" if saved else "")
        save(second.path, 30)
        second.finish()
    assert len(checkpoints.complete(store, "checkpoints")) == (KEEP if saved else 1)


def test_a_pod_uploads_only_files_that_it_wrote(
    uri: str, remote: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(remote / "metrics.jsonl", "1\n")
    first = TrainingFolder(uri, KEEP, every=60.0)
    monkeypatch.setenv(folders.SCRATCH_VARIABLE, f"{scratch}-of-another-pod")
    with first, TrainingFolder(uri, KEEP, every=60.0) as second:
        (first.path / "metrics.jsonl").write_text("1\n2\n")
        write(second.path / "ranks/1.json", "{}")
        first.finish()
        second.finish()
    assert (remote / "metrics.jsonl").read_text() == "1\n2\n"
    assert (remote / "ranks/1.json").exists()


def test_the_best_checkpoint_is_retained_and_downloaded(uri: str, remote: Path) -> None:
    with TrainingFolder(uri, KEEP, keep_best=True, every=60.0) as first:
        save(first.path, 10, best={"step": 10})
        for step in (20, 30, 40):
            save(first.path, step, best={"step": 10})
            first.finish()
    retained = {name.split("/")[0] for name in names(remote / "checkpoints")}
    assert retained == {"step-00000010", "step-00000030", "step-00000040"}
    with TrainingFolder(uri, KEEP, keep_best=True, every=60.0) as second:
        downloaded = sorted(path.name for path in (second.path / "checkpoints").iterdir())
        assert downloaded == ["step-00000010", "step-00000040"]


def test_a_step_follows_the_ranks_and_they_see_its_heartbeat(
    uri: str, remote: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(folders.SCRATCH_VARIABLE, f"{scratch}-of-the-step")
    step = FollowedFolder(uri, every=0.1)
    monkeypatch.setenv(folders.SCRATCH_VARIABLE, f"{scratch}-of-the-ranks")
    with step, TrainingFolder(uri, KEEP, every=0.1) as ranks:
        write(ranks.path / "logs/rank0.log")  # uploaded at the end only
        write(ranks.path / "config.json", "{}")
        (ranks.path / "metrics.jsonl").write_text("1\n")
        write(ranks.path / "ranks/0.json", '{"step": 1}')
        save(ranks.path, 10)
        wait_for(step.path / "metrics.jsonl", step.path / "ranks/0.json")
        wait_for(step.path / "checkpoints/step-00000010" / MANIFEST, step.path / "config.json")
        assert not (step.path / "checkpoints/step-00000010" / STATE).exists()
        (ranks.path / "metrics.jsonl").write_text("1\n2\n")
        until(lambda: (step.path / "metrics.jsonl").read_text() == "1\n2\n")
        assert not (remote / "logs").exists()
        (step.path / "launcher.heartbeat").write_text("42")
        until(lambda: (ranks.path / "launcher.heartbeat").read_text() == "42")


def test_uploads_continue(uri: str, remote: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingFolder(uri, KEEP, every=0.1) as folder:
        save(folder.path, 10)
        wait_for(remote / "checkpoints/step-00000010" / MANIFEST)
        aside = remote.rename(remote.with_name("away"))
        remote.write_text("no folder")
        save(folder.path, 20)
        until(lambda: "; trying again" in capsys.readouterr().out)
        remote.unlink()
        aside.rename(remote)
        wait_for(remote / "checkpoints/step-00000020" / MANIFEST)


def test_unreachable_is_retryable(uri: str, remote: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def be_away(*_: object) -> None:
        raise UnavailableError("no answer")

    with TrainingFolder(uri, KEEP, every=60.0) as folder:
        with monkeypatch.context() as patch:
            patch.setattr(folder, "upload", be_away)
            with pytest.raises(UnavailableError, match="be uploaded"):
                folder.finish(seconds=0)
        write(remote, "no folder")
        save(folder.path, 10)
        with pytest.raises(InputError, match="check the path and this user's rights"):
            folder.finish()


def test_inputs_and_outputs(uri: str, store: Store, remote: Path, tmp_path: Path) -> None:
    put(store, tmp_path / "a", 10, 20)
    (remote / "metrics.jsonl").write_text("1\n")
    write(remote / "evaluation/evaluation.json", "{}")
    (remote / "evaluation/predictions.csv").write_text("a")
    before = {name: (remote / name).stat().st_mtime_ns for name in names(remote)}
    with open_workspace(f"{uri}/", "export") as task:
        assert (task.path / "metrics.jsonl").read_text() == "1\n"
        checkpoint = task.download(f"{uri}/checkpoints/step-00000010")
        assert sorted(path.name for path in checkpoint.iterdir()) == [MANIFEST, STATE]
        evaluation = task.download_file(f"{uri}/evaluation/evaluation.json")
        assert evaluation.with_name("predictions.csv").read_text() == "a"
        write(task.path / "bundle/model.onnx", "weights")
        (task.path / "bundle/_SUCCESS").write_text("digest")
        assert task.to_uri(task.path / "bundle") == f"{uri}/bundle"
    assert set(names(remote)) - before.keys() == {"bundle/model.onnx", "bundle/_SUCCESS"}
    assert {name: (remote / name).stat().st_mtime_ns for name in before} == before
    assert not task.path.exists()

    with open_workspace(uri, "export") as task:  # a file that it removes is deleted in the bucket
        task.download_below("bundle/")
        (task.path / "bundle/model.onnx").unlink()
        (task.path / "bundle/_SUCCESS").write_text("new")
    assert names(remote) == sorted([*before, "bundle/_SUCCESS"])
    assert (remote / "bundle/_SUCCESS").read_text() == "new"


def test_a_failed_step_uploads_nothing(uri: str, remote: Path) -> None:
    def fail() -> None:
        with open_workspace(uri, "evaluate") as task:
            (task.path / "evaluation.json").write_text("{}")
            raise InputError("invalid")

    with pytest.raises(InputError, match="invalid"):
        fail()
    assert names(remote) == []


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ("file:///elsewhere/run-1/train/checkpoints/step-00000010", "is not of the run"),
        ("{uri}/checkpoints/step-00000010", "is not a complete checkpoint"),
    ],
)
def test_bad_checkpoint_is_an_error(uri: str, remote: Path, checkpoint: str, message: str) -> None:
    write(remote / "checkpoints/step-00000010" / STATE, "incomplete")
    with pytest.raises(InputError, match=message), open_workspace(uri, "evaluate") as task:
        task.download(checkpoint.format(uri=uri))


def test_leases_are_read_from_names_alone(uri: str, store: Store) -> None:
    def listed() -> list[str]:
        return [name for name, _ in store.list("")]

    leases.mark_begin(store)
    assert leases.begun_at(listed()) == pytest.approx(time.time(), abs=60)
    with leases.bucket_lease(uri, "evaluate"):
        assert leases.has_holder(listed(), lambda run: False)
    assert not leases.has_holder(listed(), lambda run: True)
    old = [f".leases/run.7.ab.{time.time() - LASTING_SECONDS - 9:.0f}"]
    assert not leases.has_holder(old, lambda run: False)
    assert leases.has_holder(old, lambda run: run == "run.7")


def wait_for(*paths: Path) -> None:
    until(lambda: all(path.exists() for path in paths))
