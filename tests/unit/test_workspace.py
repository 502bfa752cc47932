"""A run's folder at an address: what counts, what is kept, what a step brings and puts."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kfp_ddp.core import folders
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.runs import checkpoints
from kfp_ddp.runs.training_folder import FollowedFolder, TrainingFolder
from kfp_ddp.runs.workspace import open_workspace
from kfp_ddp.storage import leases
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.leases import LASTING_SECONDS
from kfp_ddp.storage.store import Store, sha256
from kfp_ddp.training import resume
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.manifest import DIGEST, MANIFEST, STATE, digest_of, step_dir

KEEP = 2


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(folders.SCRATCH_VARIABLE, str(tmp_path / "scratch"))
    return tmp_path / "scratch"


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/run-1/train"


@pytest.fixture
def there(address: str) -> Path:
    """What lies at the address, as a folder."""
    return Path(address.removeprefix("file://"))


@pytest.fixture
def where(address: str) -> Store:
    return open_store(address)


def save(run_dir: Path, step: int, content: str = "", best: int = 0) -> Path:
    """A whole checkpoint of a step, in place at once as a training saves it."""
    place = step_dir(run_dir / "checkpoints", step)
    folder = place.with_suffix(".tmp")
    folder.mkdir(parents=True)
    (folder / STATE).write_text(content or f"state {step}")
    about = {"size": (folder / STATE).stat().st_size, "sha256": sha256(folder / STATE)}
    fields = {"step": step, "files": {STATE: about}, "best": {"step": best} if best else None}
    (folder / MANIFEST).write_text(json.dumps({**fields, DIGEST: digest_of(fields)}))
    return folder.rename(place)


def put(where: Store, run_dir: Path, *steps: int) -> None:
    for step in steps:
        folder = save(run_dir, step)
        assert checkpoints.upload(where, f"checkpoints/{folder.name}", folder)


def names(there: Path) -> list[str]:
    found = (path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file())
    return sorted(found)


def test_the_newest_checkpoint_that_is_whole_is_gone_on_from(
    where: Store, there: Path, tmp_path: Path
) -> None:
    put(where, tmp_path / "a", 9, 10, 20)
    (there / "checkpoints/step-00000030").mkdir()
    (there / "checkpoints/step-00000030" / STATE).write_text("torn: its manifest never came")
    assert checkpoints.fetch_newest(where, "checkpoints", tmp_path / "b") == (
        "checkpoints/step-00000020"
    )
    brought = tmp_path / "b/checkpoints/step-00000020"
    assert (brought / STATE).read_text() == "state 20"
    assert [path.name for path in brought.parent.iterdir()] == [brought.name]


@pytest.mark.parametrize("damaged", [STATE, MANIFEST])
def test_one_that_does_not_verify_is_passed_over_and_can_be_made_again(
    where: Store, there: Path, tmp_path: Path, damaged: str
) -> None:
    put(where, tmp_path / "a", 10, 20)
    file = there / "checkpoints/step-00000020" / damaged
    file.write_bytes(file.read_bytes().replace(b"2", b"3"))
    assert checkpoints.fetch_newest(where, "checkpoints", tmp_path / "b").endswith("10")
    folder = step_dir(tmp_path / "a/checkpoints", 20)
    assert checkpoints.upload(where, f"checkpoints/{folder.name}", folder)
    assert checkpoints.fetch_newest(where, "checkpoints", tmp_path / "c").endswith("20")


def test_where_none_verifies_nothing_is_begun_anew(
    where: Store, there: Path, tmp_path: Path
) -> None:
    put(where, tmp_path / "a", 10)
    (there / "checkpoints/step-00000010" / STATE).write_text("else")
    with pytest.raises(StorageError, match=r"none of the 1 checkpoints"):
        checkpoints.fetch_newest(where, "checkpoints", tmp_path / "b")
    assert (there / "checkpoints/step-00000010" / MANIFEST).exists()


def test_an_upload_that_is_cut_off_leaves_what_counted_before(
    where: Store, there: Path, tmp_path: Path
) -> None:
    put(where, tmp_path / "a", 10, 20)
    again = save(tmp_path / "again", 20, content="the same step, made again")
    (again / STATE).rename(again / "aside")
    (again / STATE).mkdir()  # which no destination takes
    with pytest.raises((StorageError, InputError, OSError)):
        checkpoints.upload(where, "checkpoints/step-00000020", again)
    assert checkpoints.fetch_newest(where, "checkpoints", tmp_path / "b").endswith("10")
    (again / STATE).rmdir()
    (again / "aside").rename(again / STATE)
    assert checkpoints.upload(where, "checkpoints/step-00000020", again)
    assert not checkpoints.upload(where, "checkpoints/step-00000020", again)


def test_the_newest_few_are_kept_and_what_is_torn_goes(
    where: Store, there: Path, tmp_path: Path
) -> None:
    put(where, tmp_path / "a", 9, 10, 100, 20)
    (there / "checkpoints/step-00000015").mkdir()
    (there / "checkpoints/step-00000015" / STATE).write_text("torn")
    (there / "checkpoints/notes.txt").write_text("somebody's own")
    checkpoints.prune(where, "checkpoints", KEEP)
    assert {name.partition("/")[0] for name in names(there / "checkpoints")} == {
        *("step-00000020", "step-00000100", "notes.txt")
    }


def test_a_training_goes_on_where_another_pod_ended(address: str, there: Path) -> None:
    with TrainingFolder(address, KEEP, every=60.0) as first:
        assert not first.resumed
        (first.path / "metrics.jsonl").write_text("1\n")
        for step in (10, 20, 30):
            save(first.path, step)
        (first.path / "launcher.heartbeat").touch()
        (first.path / "logs").mkdir()
        (first.path / "logs/failure.json").write_text("{}")
        first.finish()
    assert names(there) == [
        *("checkpoints/step-00000030/manifest.json", "checkpoints/step-00000030/state.pt"),
        *("logs/failure.json", "metrics.jsonl"),
    ]
    (first.path / "metrics.jsonl").write_text("what a pod left that ended between two turns\n")
    save(first.path, 40)
    with TrainingFolder(address, KEEP, every=60.0) as second:
        assert second.resumed == "checkpoints/step-00000030"
        assert (second.path / "metrics.jsonl").read_text() == "1\n"
        assert [p.name for p in (second.path / "checkpoints").iterdir()] == ["step-00000030"]
        save(second.path, 40)
        second.finish()
    assert len(names(there / "checkpoints")) == 2 * KEEP


@pytest.mark.parametrize("saved", [False, True])
def test_a_start_that_begins_anew_counts_alone_and_sets_aside_what_was_there(
    address: str, where: Store, there: Path, tmp_path: Path, saved: bool
) -> None:
    put(where, tmp_path / "a", 900, 1000)
    (there / "checkpoints.old-0/step-00000007").mkdir(parents=True)
    (there / "checkpoints.old-0/step-00000007" / STATE).write_text("of a start before that")
    with TrainingFolder(address, KEEP, every=60.0) as first:
        anew = {"output_dir": str(first.path), "resume": "never", "run_id": "17"}
        resume.begin(TrainConfig.create(data="/d", **anew), [])
        for step in (10, 20) if saved else ():
            save(first.path, step)
            first.finish()
        first.finish()
    counting = ["step-00000010", "step-00000020"] if saved else []
    assert checkpoints.complete(where, "checkpoints") == [
        f"checkpoints/{each}" for each in reversed(counting)
    ]
    assert checkpoints.complete(where, "checkpoints.old-1") == [
        *("checkpoints.old-1/step-00001000", "checkpoints.old-1/step-00000900")
    ]
    assert (there / "checkpoints.old-1/step-00000900" / STATE).read_text() == "state 900"
    assert (there / "checkpoints.old-0/step-00000007" / STATE).exists()
    assert (there / "begun-by").exists()
    with TrainingFolder(address, KEEP, every=60.0) as second:
        assert second.resumed == ("checkpoints/step-00000020" if saved else "")
        save(second.path, 30)
        second.finish()
    assert len(checkpoints.complete(where, "checkpoints")) == (KEEP if saved else 1)


def test_a_pod_puts_what_it_wrote_and_not_what_it_fetched(
    address: str, there: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.mkdir(parents=True)
    (there / "metrics.jsonl").write_text("1\n")
    first = TrainingFolder(address, KEEP, every=60.0)
    monkeypatch.setenv(folders.SCRATCH_VARIABLE, f"{scratch}-of-another-pod")
    with first, TrainingFolder(address, KEEP, every=60.0) as second:
        (first.path / "metrics.jsonl").write_text("1\n2\n")
        (second.path / "ranks").mkdir()
        (second.path / "ranks/1.json").write_text("{}")
        first.finish()
        second.finish()
    assert (there / "metrics.jsonl").read_text() == "1\n2\n"
    assert (there / "ranks/1.json").exists()


def test_the_best_checkpoint_stays_and_comes_along(address: str, there: Path) -> None:
    with TrainingFolder(address, KEEP, keep_best=True, every=60.0) as first:
        save(first.path, 10, best=10)
        for step in (20, 30, 40):
            save(first.path, step, best=10)
            first.finish()
    kept = {name.split("/")[0] for name in names(there / "checkpoints")}
    assert kept == {"step-00000010", "step-00000030", "step-00000040"}
    with TrainingFolder(address, KEEP, keep_best=True, every=60.0) as second:
        brought = sorted(path.name for path in (second.path / "checkpoints").iterdir())
        assert brought == ["step-00000010", "step-00000040"]


def test_a_checkpoint_is_on_its_way_before_the_training_ends(address: str, there: Path) -> None:
    with TrainingFolder(address, KEEP, every=0.1) as carried:
        save(carried.path, 10)
        wait_for(there / "checkpoints/step-00000010" / MANIFEST)


def test_the_step_sees_what_the_ranks_tell_and_the_ranks_that_it_lives(
    address: str, there: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(folders.SCRATCH_VARIABLE, f"{scratch}-of-the-step")
    step = FollowedFolder(address, every=0.1)
    monkeypatch.setenv(folders.SCRATCH_VARIABLE, f"{scratch}-of-the-ranks")
    with step, TrainingFolder(address, KEEP, every=0.1) as ranks:
        (ranks.path / "metrics.jsonl").write_text("1\n")
        (ranks.path / "ranks").mkdir()
        (ranks.path / "ranks/0.json").write_text('{"step": 1}')
        save(ranks.path, 10)
        wait_for(step.path / "metrics.jsonl", step.path / "ranks/0.json")
        wait_for(step.path / "checkpoints/step-00000010" / MANIFEST)
        assert not (step.path / "checkpoints/step-00000010" / STATE).exists()
        (ranks.path / "metrics.jsonl").write_text("1\n2\n")
        until(lambda: (step.path / "metrics.jsonl").read_text() == "1\n2\n")
        (step.path / "launcher.heartbeat").write_text("42")
        until(lambda: (ranks.path / "launcher.heartbeat").read_text() == "42")
        (there / "launcher.trace.json").write_text("of a person")
        wait_for(ranks.path / "launcher.trace.json")


def test_a_bucket_that_is_away_for_a_while_costs_nothing_but_the_wait(
    address: str, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with TrainingFolder(address, KEEP, every=0.1) as carried:
        save(carried.path, 10)
        wait_for(there / "checkpoints/step-00000010" / MANIFEST)
        aside = there.rename(there.with_name("away"))
        there.write_text("no folder any more")
        save(carried.path, 20)
        until(lambda: "; trying again" in capsys.readouterr().out)
        there.unlink()
        aside.rename(there)
        wait_for(there / "checkpoints/step-00000020" / MANIFEST)


def test_a_bucket_that_stays_away_fails_the_training_in_one_line(address: str, there: Path) -> None:
    with TrainingFolder(address, KEEP, every=60.0) as carried:
        there.parent.mkdir(parents=True)
        there.write_text("no folder")
        save(carried.path, 10)
        with pytest.raises(StorageError, match=r"cannot be uploaded") as raised:
            carried.finish(seconds=0)
    assert raised.value.retryable


def test_a_step_brings_what_it_reads_and_puts_what_it_writes(
    address: str, where: Store, there: Path, tmp_path: Path
) -> None:
    put(where, tmp_path / "a", 10, 20)
    (there / "metrics.jsonl").write_text("1\n")
    (there / "evaluation").mkdir()
    (there / "evaluation/evaluation.json").write_text("{}")
    (there / "evaluation/predictions.csv").write_text("a")
    before = {name: (there / name).stat().st_mtime_ns for name in names(there)}
    with open_workspace(f"{address}/", "export") as task:
        assert (task.path / "metrics.jsonl").read_text() == "1\n"
        checkpoint = task.download(f"{address}/checkpoints/step-00000010")
        assert sorted(path.name for path in checkpoint.iterdir()) == [MANIFEST, STATE]
        evaluation = task.download_file(f"{address}/evaluation/evaluation.json")
        assert evaluation.with_name("predictions.csv").read_text() == "a"
        (task.path / "bundle").mkdir()
        (task.path / "bundle/model.onnx").write_text("weights")
        (task.path / "bundle/_SUCCESS").write_text("digest")
        assert task.to_uri(task.path / "bundle") == f"{address}/bundle"
    assert set(names(there)) - before.keys() == {"bundle/model.onnx", "bundle/_SUCCESS"}
    assert {name: (there / name).stat().st_mtime_ns for name in before} == before
    assert not task.path.exists()


def test_what_a_step_removed_is_gone_there_too_and_no_more(address: str, there: Path) -> None:
    for name in ("bundle/old.onnx", "bundle/_SUCCESS", "evaluation/evaluation.json"):
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_text("of before")
    with open_workspace(address, "export") as task:
        task.download_below("bundle/")
        (task.path / "bundle/old.onnx").unlink()
        (task.path / "bundle/_SUCCESS").write_text("anew")
    assert names(there) == ["bundle/_SUCCESS", "evaluation/evaluation.json"]
    assert (there / "bundle/_SUCCESS").read_text() == "anew"


def test_what_a_step_wrote_before_it_failed_does_not_count(address: str, there: Path) -> None:
    def fail() -> None:
        with open_workspace(address, "evaluate") as task:
            (task.path / "evaluation.json").write_text("{}")
            raise InputError("of itself")

    with pytest.raises(InputError, match="of itself"):
        fail()
    assert names(there) == []


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("file:///elsewhere/run-1/train/checkpoints/step-00000010", "is not of the run"),
        ("{address}/checkpoints/step-00000010", "is not a complete checkpoint"),
    ],
)
def test_a_step_takes_no_checkpoint_of_another_run_or_half_of_one(
    address: str, there: Path, place: str, line: str
) -> None:
    (there / "checkpoints/step-00000010").mkdir(parents=True)
    (there / "checkpoints/step-00000010" / STATE).write_text("torn")
    with pytest.raises(InputError, match=line), open_workspace(address, "evaluate") as task:
        task.download(place.format(address=address))


def test_a_path_stays_a_path(tmp_path: Path) -> None:
    with open_workspace(str(tmp_path), "evaluate") as task:
        assert task.path == tmp_path
        assert task.download(f"{tmp_path}/checkpoints") == tmp_path / "checkpoints"
        assert task.to_uri(tmp_path / "bundle") == f"{tmp_path}/bundle"


def test_who_uses_a_run_is_told_by_names_alone(
    address: str, where: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed() -> list[str]:
        return [name for name, _ in where.list("")]

    leases.mark_begin(where)
    assert leases.begun_at(listed()) == pytest.approx(time.time(), abs=60)
    with leases.bucket_lease(address, "evaluate"):
        assert leases.has_holder(listed(), lambda run: False)
    assert not leases.has_holder(listed(), lambda run: True)
    old = [f".leases/run.7.ab.{time.time() - LASTING_SECONDS - 9:.0f}"]
    assert not leases.has_holder(old, lambda run: False)
    assert leases.has_holder(old, lambda run: run == "run.7")


def wait_for(*paths: Path) -> None:
    until(lambda: all(path.exists() for path in paths))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)
