"""A checkpoint is whole or not there; an error of the writer is never lost."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kfp_ddp.core.errors import InputError, JobError, StorageError
from kfp_ddp.runs.train.outputs import newest_checkpoint
from kfp_ddp.training import checkpoint, resume
from kfp_ddp.training.checkpoint import Writer, newest_valid, steps
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.distributed import World
from kfp_ddp.training.manifest import DIGEST, MANIFEST, STATE
from kfp_ddp.training.model import build
from kfp_ddp.training.prepare import resolve
from kfp_ddp.training.splits import Index
from kfp_ddp.training.strategies import Ddp, Fsdp

REPLICATED = Ddp.form
RECORDED = Path(__file__).parent / "recorded"


def run(output: Path, **fields: Any) -> TrainConfig:
    settings: dict[str, Any] = {"data": "/d", "output_dir": str(output), "image_size": 16}
    return TrainConfig.create(**{**settings, "model": "cifar_resnet8", **fields})


def manifest(config: TrainConfig, classes: tuple[str, ...] = ("a", "b")) -> dict[str, Any]:
    more = {"epoch": 1.0, "world_size": 1, "samples": 4, "metrics": {}, "form": REPLICATED}
    return checkpoint.manifest_of(config, classes, **more)


def save(output: Path, step: int, value: float = 1.0, **fields: Any) -> Path:
    state = {"model": {"w": torch.full((1000,), value)}, "ema": None, "optimizer": {}}
    directory = output / "checkpoints"
    return checkpoint.write(directory, step, state, manifest(run(output, **fields)))


def test_the_newest_that_verifies_wins(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    assert newest_valid(directory) is None
    for step in (5, 10, 100, 1000):
        save(tmp_path, step, value=step)
    torn = directory / "step-00001000" / STATE
    torn.write_bytes(torn.read_bytes()[:-1])
    flipped = directory / "step-00000100" / STATE
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    newest = newest_valid(directory)
    assert newest is not None
    assert newest.step == 10
    assert newest.state()["model"]["w"][0] == 10
    (directory / "step-00000010" / MANIFEST).write_text('{"step": 10')
    again = newest_valid(directory)
    assert again is not None
    assert again.step == 5


def test_what_does_not_verify_is_set_aside_and_not_counted_among_those_kept(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    save(tmp_path, 10)
    (save(tmp_path, 20) / STATE).write_bytes(b"torn")
    (save(tmp_path, 100_000_000) / STATE).write_bytes(b"torn")
    (directory / ".step-00000030.tmp").mkdir()
    shunned = checkpoint.set_aside(directory, newest_valid(directory))
    assert [path.name for path in shunned] == ["step-100000000", "step-00000020"]
    assert sorted(path.name for path in directory.iterdir()) == [
        "corrupt-step-00000020",
        "corrupt-step-100000000",
        "step-00000010",
    ]


def test_a_newer_step_of_more_digits_is_newer(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    save(tmp_path, 99_999_999)
    save(tmp_path, 100_000_000)
    assert checkpoint.set_aside(directory, newest_valid(directory)) == []
    (directory / "step-100000000" / STATE).write_bytes(b"torn")
    shunned = checkpoint.set_aside(directory, newest_valid(directory))
    assert [path.name for path in shunned] == ["step-100000000"]


@pytest.mark.parametrize("recovers", [True, False])
def test_a_volume_that_fails_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recovers: bool
) -> None:
    """A link to itself (ELOOP) stands for ESTALE and EIO, which no real part gives on demand."""
    directory = tmp_path / "checkpoints"
    save(tmp_path, 10)
    state = save(tmp_path, 20) / STATE
    kept = state.rename(tmp_path / STATE)
    state.symlink_to(state.name)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if recovers:
            kept.rename(state)

    monkeypatch.setattr(time, "sleep", pause)
    index = Index(tmp_path, ("a", "b"), ("x",) * 4, (0, 1, 0, 1))
    if recovers:
        found = resume.choose(directory, run(tmp_path), index, REPLICATED)
        assert found == directory / "step-00000020"
        assert len(pauses) == 1
        return
    with pytest.raises(checkpoint.UnreadableError, match="Too many levels") as caught:
        resume.choose(directory, run(tmp_path), index, REPLICATED)
    assert "\n" not in str(caught.value)
    assert caught.value.retryable
    assert pauses
    assert [path.name for path in steps(directory)] == ["step-00000020", "step-00000010"]


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_PAUSES_S", ())
    directory = tmp_path / "checkpoints"
    directory.symlink_to(directory.name)
    with pytest.raises(checkpoint.UnreadableError, match=f"^cannot read {directory}: "):
        newest_valid(directory)


def test_without_a_whole_one_nothing_is_begun_anew(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    for step in (10, 20):
        (save(tmp_path, step) / STATE).write_bytes(b"torn")
    index = Index(tmp_path, ("a", "b"), ("x",) * 4, (0, 1, 0, 1))
    with pytest.raises(StorageError, match=r"none of the 2 checkpoints in .* is valid"):
        resume.choose(directory, run(tmp_path), index, REPLICATED)
    assert len(steps(directory)) == 2


@pytest.mark.parametrize("part", ["model", "ema"])
def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path, part: str) -> None:
    writer = Writer(tmp_path / "checkpoints", keep=2)
    state = {"model": {"w": torch.ones(3)}, "ema": {"w": torch.ones(3)}}
    writer.save(1, state, manifest(run(tmp_path)))
    state[part]["w"][1] = float("inf")
    writer.save(2, state, manifest(run(tmp_path)))
    with pytest.raises(JobError, match="after step 2 w is NaN or infinite"):
        writer.wait()
    assert [path.name for path in steps(writer.directory)] == ["step-00000001"]


def test_the_first_save_makes_the_folder_itself_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    original = os.fsync

    def note(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    save(tmp_path, 1)
    assert str(tmp_path) in synced
    assert str(tmp_path / "checkpoints") in synced


def test_the_writer_keeps_k_and_the_state_of_the_moment(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "checkpoints", keep=2)
    weight = torch.zeros(1000)
    for step in (1, 2, 3):
        weight.fill_(step)
        writer.save(step, {"model": {"w": weight}}, manifest(run(tmp_path)))
        weight.fill_(-1)
    writer.wait()
    assert [path.name for path in steps(writer.directory)] == ["step-00000003", "step-00000002"]
    newest = newest_valid(writer.directory)
    assert newest is not None
    assert newest.state()["model"]["w"].tolist() == [3.0] * 1000


def test_what_stays_until_the_update_is_copied_while_the_loop_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may change before is copied at once; for the rest `copied` waits."""
    begin, fill = threading.Event(), Writer._fill_later

    def late(writer: Writer) -> None:
        begin.wait(10)
        fill(writer)

    monkeypatch.setattr(Writer, "_fill_later", late)
    writer = Writer(tmp_path / "checkpoints", keep=2)
    weight, statistics = torch.ones(4), torch.ones(4)
    state = {"model": {"w": weight, "s": statistics}}
    writer.save(1, state, manifest(run(tmp_path)), volatile=[statistics])
    statistics += 1
    threading.Timer(0.2, begin.set).start()
    writer.copied.wait()
    weight += 1
    writer.wait()
    newest = newest_valid(tmp_path / "checkpoints")
    assert newest is not None
    assert {k: v.tolist() for k, v in newest.state()["model"].items()} == {
        "w": [1.0] * 4,
        "s": [1.0] * 4,
    }


def test_saving_waits_for_the_copy_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    original = torch.save

    def slow(*args: Any, **kwargs: Any) -> None:
        assert go.wait(30)
        original(*args, **kwargs)

    monkeypatch.setattr(torch, "save", slow)
    writer = Writer(tmp_path / "checkpoints", keep=2)
    writer.save(1, {"model": {"w": torch.ones(3)}}, manifest(run(tmp_path)))
    assert newest_valid(writer.directory) is None
    go.set()
    writer.wait()
    assert newest_valid(writer.directory) is not None


def test_an_error_of_the_writer_surfaces_at_the_next_save(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "checkpoints", keep=2)
    writer.save(1, {"model": {"w": torch.ones(3)}}, manifest(run(tmp_path)))
    writer.wait()
    moved = tmp_path / "moved"
    writer.directory.rename(moved)
    writer.directory.touch()  # a file is where the folder was
    writer.save(2, {"model": {"w": torch.ones(3)}}, manifest(run(tmp_path)))
    with pytest.raises(StorageError, match="cannot save a checkpoint"):
        writer.save(3, {"model": {"w": torch.ones(3)}}, manifest(run(tmp_path)))
    assert newest_valid(moved) is not None


def test_the_same_step_can_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 10, value=1)
    save(tmp_path, 10, value=2)
    newest = newest_valid(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.state()["model"]["w"][0] == 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]


def test_a_state_with_code_in_it_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    path = save(tmp_path, 10)
    torch.save({"model": Evil()}, path / STATE)
    about = json.loads((path / MANIFEST).read_text())
    about["files"][STATE]["size"] = (path / STATE).stat().st_size
    about["files"][STATE]["sha256"] = checkpoint.sha256_of(path / STATE)
    del about[DIGEST]  # as earlier versions wrote it, which anybody can
    (path / MANIFEST).write_text(json.dumps(about))
    with pytest.raises(Exception, match=r"weights_only|Unsupported"):
        checkpoint.verify(path).state()
    assert not (tmp_path / "ran").exists()


def test_load_model_takes_the_averaged_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network, average = build("cifar_resnet8", 2), build("cifar_resnet8", 2)
    state = {"model": network.state_dict(), "ema": average.state_dict(), "optimizer": {}}
    path = checkpoint.write(tmp_path / "checkpoints", 7, state, manifest(run(tmp_path)))
    loaded, info = checkpoint.load_model(path)
    assert not loaded.training
    assert (info.step, info.classes, info.image_size) == (7, ("a", "b"), 16)
    for mine, theirs in zip(loaded.parameters(), average.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("fields", "classes", "word"),
    [
        ({"model": "cifar_resnet14"}, ("a", "b"), "model was cifar_resnet8"),
        ({}, ("a", "b", "c"), "number of classes was 2 and is now 3"),
        ({}, ("a", "z"), "class 1 was 'b' and is now 'z'"),
        ({"batch_size": 64}, ("a", "b"), "batch_size was 256 and is now 64"),
        ({"seed": 1}, ("a", "b"), "seed was 0"),
        ({"image_size": 32}, ("a", "b"), "image_size"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, fields: dict[str, Any], classes: tuple[str, ...], word: str
) -> None:
    save(tmp_path, 10)
    index = Index(tmp_path, classes, ("x",) * 4, (0, 1, 0, 1))
    with pytest.raises(InputError, match=word):
        resume.choose(tmp_path / "checkpoints", run(tmp_path, **fields), index, REPLICATED)


def test_a_state_of_another_form_is_refused(tmp_path: Path) -> None:
    """fsdp on one rank saves as ddp does: what counts is how it was saved."""
    save(tmp_path, 10, strategy="fsdp")
    index = Index(tmp_path, ("a", "b"), ("x",) * 4, (0, 1, 0, 1))
    directory, config = tmp_path / "checkpoints", run(tmp_path, strategy="fsdp")
    assert resume.choose(directory, config, index, REPLICATED) == directory / "step-00000010"
    with pytest.raises(InputError, match="strategy was ddp, single or one rank and is now fsdp"):
        resume.choose(directory, config, index, Fsdp.form)


@pytest.mark.parametrize(
    ("written", "form"),
    [
        ("ddp, single or one rank", Ddp.form),
        ("fsdp over several ranks", Fsdp.form),
        ("replicated", "replicated"),
        ("sharded", "sharded"),
    ],
)
def test_the_form_of_older_checkpoints_is_known(tmp_path: Path, written: str, form: str) -> None:
    """They hold the text in place of the key."""
    about = {**manifest(run(tmp_path)), "form": written}
    path = checkpoint.write(tmp_path / "checkpoints", 10, {"model": {}}, about)
    index = Index(tmp_path, ("a", "b"), ("x",) * 4, (0, 1, 0, 1))
    assert resume.choose(path.parent, run(tmp_path), index, form) == path
    other = Fsdp.form if form == Ddp.form else Ddp.form
    with pytest.raises(InputError, match="strategy was"):
        resume.choose(path.parent, run(tmp_path), index, other)


def test_a_manifest_that_an_earlier_version_wrote_is_read_and_resumed(tmp_path: Path) -> None:
    """As commit 4f70e37 wrote it, beside a state of this version."""
    about = json.loads((RECORDED / "checkpoint_manifest_4f70e37.json").read_text())
    state = {"model": build("cifar_resnet8", 3).state_dict(), "ema": None, "optimizer": {}}
    directory = tmp_path / "checkpoints"
    path = checkpoint.write(directory, about.pop("step"), state, about)
    _, info = checkpoint.load_model(path)
    assert (info.step, info.classes) == (36, ("class0", "class1", "class2"))
    index = Index(tmp_path, info.classes, ("x",) * 96, (0, 1, 2) * 32)
    config = TrainConfig.create(**{**about["config"], "output_dir": str(tmp_path)})
    assert resume.choose(directory, config, index, Ddp.form) == path
    unset = run(tmp_path, image_size=8, epochs=3)
    resolved = resolve(unset, World(0, 2, 0, 2, torch.device("cpu")), 96)
    assert resume.choose(directory, resolved, index, Ddp.form) == path
    kept = (resolved.batch_size, resolved.micro_batch_size, resolved.warmup_epochs)
    assert kept == (8, 4, 1.0)


def test_beginning_anew_keeps_what_was_there(tmp_path: Path) -> None:
    save(tmp_path, 10)
    index = Index(tmp_path, ("a", "b"), ("x",) * 4, (0, 1, 0, 1))
    config = run(tmp_path, resume="never")
    assert not resume.continues(config, ["a"])
    resume.begin(config, ["a"])
    assert resume.choose(tmp_path / "checkpoints", config, index, REPLICATED) is None
    assert newest_valid(tmp_path / "checkpoints.old-0") is not None


@pytest.mark.parametrize(
    ("run_id", "launches", "goes_on"),
    [
        ("", ["b", "c"], True),  # a node was lost, another came
        ("", ["c"], False),  # started again by somebody
        ("", [""], False),
        ("run/train", ["c"], True),  # another attempt of the same step
        ("other/train", ["a"], False),
    ],
)
def test_never_is_for_the_first_start_only(
    tmp_path: Path, run_id: str, launches: list[str], goes_on: bool
) -> None:
    first = run(tmp_path, resume="never", run_id="run/train" if run_id else "")
    resume.begin(first, ["a", "b"])
    save(tmp_path, 10)
    assert resume.continues(run(tmp_path, resume="never", run_id=run_id), launches) is goes_on
    assert not resume.continues(run(tmp_path, run_id=run_id), launches)


def test_a_class_of_another_name_is_named_alone(tmp_path: Path) -> None:
    names = tuple(f"class number {i}" for i in range(1000))
    config = run(tmp_path)
    state: dict[str, Any] = {"model": {}}
    checkpoint.write(tmp_path / "checkpoints", 1, state, manifest(config, names))
    index = Index(tmp_path, (*names[:500], "x", *names[501:]), ("x",) * 4, (0, 1, 0, 1))
    with pytest.raises(InputError, match="class 500 was 'class number 500' and is now 'x'") as got:
        resume.choose(tmp_path / "checkpoints", config, index, REPLICATED)
    assert len(str(got.value)) < 500


def test_the_step_tells_the_newest_by_its_number(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.step == 100_000_000
