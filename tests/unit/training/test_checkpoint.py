"""A checkpoint is complete or absent; an error of the writer is never lost."""

import contextlib
import errno
import os
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from kfp_ddp.core.errors import JobError, StorageError
from kfp_ddp.pictures.splits import Index
from kfp_ddp.runs.record import newest_checkpoint
from kfp_ddp.training.data.loader import Split
from kfp_ddp.training.model.networks import MEAN, STD, build
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.manifest import MANIFEST, STATE, step_dir, step_of
from kfp_ddp.training.spec.model_file import pack
from kfp_ddp.training.state import checkpoint, saving
from kfp_ddp.training.state.checkpoint import Writer, load_model, newest_valid, steps
from tests.files import write
from tests.training_ranks import config, dataset, newest, run, trainer


def about(config: TrainConfig) -> dict[str, Any]:
    more = {"epoch": 1.5, "samples": 4, "form": "replicated"}
    metrics = {"loss": 0.25, "top5": float("nan")}
    return checkpoint.manifest_of(config, ("a", "\N{SNOWMAN}"), **more, metrics=metrics)


def save(output: Path, step: int, value: float = 1.0) -> Path:
    state = {"model": {"w": torch.full((300,), value)}, "ema": None, "optimizer": {}}
    return checkpoint.write(output / "checkpoints", step, state, about(run(output)))


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "checkpoints", keep=2)


def saved(writer: Writer) -> Any:
    """The state of the newest checkpoint, after a wait."""
    writer.wait()
    return newest(writer.directory.parent).state()


def weights(value: float = 1.0, count: int = 3) -> dict[str, Any]:
    return {"model": {"w": torch.full((count,), value)}}


# --- what is read ---


def test_newest_valid_step_by_number_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    assert newest_valid(directory) is None
    for step in (5, 10, 100, 99_999_999, 100_000_000):
        save(tmp_path, step, value=step)
    assert newest(tmp_path).step == 100_000_000
    chosen = newest_checkpoint(tmp_path)
    assert chosen is not None
    assert chosen.step == 100_000_000
    assert checkpoint.set_aside(directory, newest(tmp_path)) == []
    for step in (100_000_000, 99_999_999, 100):
        (step_dir(directory, step) / STATE).write_bytes(b"torn")
    assert newest(tmp_path).step == 10
    assert newest(tmp_path).state()["model"]["w"][0] == 10


def test_invalid_newer_steps_are_set_aside(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    save(tmp_path, 10)
    for step in (20, 100_000_000):
        (save(tmp_path, step) / STATE).write_bytes(b"torn")
    write(directory / "corrupt-step-00000020" / "of before")
    (directory / ".step-00000030.tmp").mkdir()
    moved = checkpoint.set_aside(directory, newest(tmp_path))
    assert [path.name for path in moved] == ["step-100000000", "step-00000020"]
    names = ["corrupt-step-00000020", "corrupt-step-100000000", "step-00000010"]
    assert sorted(path.name for path in directory.iterdir()) == names
    assert (directory / names[0] / STATE).read_bytes() == b"torn"
    (directory / names[2] / STATE).write_bytes(b"torn")
    assert [path.name for path in checkpoint.set_aside(directory, None)] == [names[2]]


@pytest.mark.parametrize("recovers", [True, False])
def test_failing_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recovers: bool) -> None:
    """A link to itself (ELOOP) stands for ESTALE and EIO, which no real part gives on demand."""
    directory = tmp_path / "checkpoints"
    save(tmp_path, 10)
    state = save(tmp_path, 20) / STATE
    moved = state.rename(tmp_path / STATE)
    state.symlink_to(state.name)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if recovers:
            moved.rename(state)

    monkeypatch.setattr(time, "sleep", pause)
    split = Split(Index(tmp_path, ("a", "\N{SNOWMAN}"), ("x",) * 4, (0, 1, 0, 1)), None)
    if recovers:
        assert saving.choose(directory, run(tmp_path), split) == step_dir(directory, 20)
        assert len(pauses) == 1
        return
    with pytest.raises(checkpoint.UnreadableError, match="Too many levels") as caught:
        saving.choose(directory, run(tmp_path), split)
    assert caught.value.retryable
    assert pauses
    assert [step_of(path) for path in steps(directory)] == [20, 10]


def test_unreadable_folder_is_not_empty(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_PAUSES_S", ())
    writer.directory.symlink_to(writer.directory.name)
    with pytest.raises(checkpoint.UnreadableError, match=f"^cannot read {writer.directory}: "):
        newest_valid(writer.directory)
    writer.save(1, weights(), {})
    with pytest.raises(StorageError, match="those saved before cannot be read now; make room"):
        writer.wait()


@pytest.mark.parametrize("averaged", [True, False])
def test_model_is_built_as_set_with_averaged_weights(tmp_path: Path, averaged: bool) -> None:
    config = run(tmp_path, blur_pool=True)
    network, average = (build("cifar_resnet8", 2, blur_pool=True) for _ in range(2))
    state = {"model": network.state_dict(), "ema": average.state_dict() if averaged else None}
    loaded, info = load_model(checkpoint.write(tmp_path, 7, state, about(config)))
    assert list(map(repr, loaded.modules())) == list(map(repr, network.eval().modules()))
    assert (info.mean, info.std, info.image_size, info.step) == (MEAN, STD, 16, 7)
    expected = (average if averaged else network).parameters()
    for own, theirs in zip(loaded.parameters(), expected, strict=True):
        assert torch.equal(own, theirs)
    text = "from torch.nn import Flatten\n\n\ndef model(classes):\n    return Flatten(classes)\n"
    (tmp_path / "mine.py").write_text(text)
    own_model = {"model_code": pack(tmp_path / "mine.py")}
    built = replace(info, model="mine.py:model", config=own_model).network()
    assert isinstance(built, torch.nn.Flatten)
    with torch.device("meta"):
        sized = replace(info, model="vit_b_32", image_size=64, config={}).network()
    assert sized.image_size == 64


# --- what is written ---


def test_folder_is_durable_after_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    original = os.fsync

    def note(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    save(tmp_path, 1)
    assert {str(tmp_path), str(tmp_path / "checkpoints")} <= set(synced)


def test_same_step_can_be_saved_again_after_a_kill(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    save(tmp_path, 10, value=1)
    write(directory / ".step-00000010.tmp" / "left")
    path = save(tmp_path, 10, value=2)
    assert newest(tmp_path).state()["model"]["w"][0] == 2
    assert [entry.name for entry in directory.iterdir()] == ["step-00000010"]
    assert sorted(entry.name for entry in path.iterdir()) == sorted([MANIFEST, STATE])


def test_writer_keeps_the_newest_and_the_spared_steps(writer: Writer) -> None:
    weight = torch.zeros(1000)
    for step in (1, 2, 3, 4):
        weight.fill_(step)
        writer.save(step, {"model": {"w": weight}}, {}, keep_also=(1,))
        weight.fill_(-1)
    assert saved(writer)["model"]["w"].tolist() == [4.0] * 1000
    assert [step_of(path) for path in steps(writer.directory)] == [4, 3, 1]


def test_old_checkpoint_that_cannot_be_deleted_ends_no_run(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:  # a reader has it open, on NFS
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    with monkeypatch.context() as held:
        held.setattr(shutil, "rmtree", refuse)
        for step in (1, 2, 3):
            writer.save(step, weights(), {})
        writer.wait()
    assert "step-00000001 cannot be deleted (Directory not empty)" in capsys.readouterr().out
    writer.save(4, weights(), {})
    writer.wait()
    assert [step_of(path) for path in steps(writer.directory)] == [4, 3]


@pytest.mark.parametrize("volatile", [True, False])
def test_only_volatile_tensors_are_copied_before_the_loop_continues(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, volatile: bool
) -> None:
    """A change before `copied` is set shows which tensors were not copied yet."""
    begin, fill = threading.Event(), Writer._fill_later

    def late(writer: Writer) -> None:
        assert begin.wait(30)
        fill(writer)

    monkeypatch.setattr(Writer, "_fill_later", late)
    tensors = [torch.full((3,), float(number)) for number in range(4)]
    groups = [tensors[2], (tensors[3], "x", 5)]
    state = {"model": {"w": tensors[0], "s": tensors[1]}, "groups": groups}
    writer.save(1, state, {}, volatile=[tensors[1]] if volatile else None)
    assert not writer.copied.is_set()
    for tensor in tensors:
        tensor += 10
    begin.set()
    state = saved(writer)
    assert writer.copied.is_set()
    copies = [*state["model"].values(), state["groups"][0], state["groups"][1][0]]
    values = [10, 1, 12, 13] if volatile else [0, 1, 2, 3]
    assert [copy.tolist() for copy in copies] == [[float(value)] * 3 for value in values]
    assert state["groups"][1][1:] == ["x", 5]


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = property(lambda _: True)
    device = property(lambda _: torch.device("cuda"))


def test_gpu_copies_beside_the_loop_and_never_into_what_is_written(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for CUDA records the order."""
    cuda, call, end = mock.MagicMock(), mock.call, threading.Event()
    loop, side = cuda.current_stream.return_value, cuda.Stream.return_value
    event = side.record_event.return_value
    event.query.return_value = False

    def write(_directory: Path, step: int, state: Any, _manifest: Any) -> None:
        assert event.synchronize.call_count == step
        assert end.wait(30)
        cuda.write(state["model"]["w"].tolist())

    def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        cuda.copy(int(source), non_blocking)
        return target.fill_(int(source))

    cuda.allocate.side_effect = lambda like, **_: torch.zeros(like.shape)
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch, "empty_like", cuda.allocate)
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.setattr(checkpoint, "write", write)
    w, mean = (torch.full((1,), value).as_subclass(OnGpu) for value in (1.0, 2.0))
    writer.save(1, {"model": {"w": w, "mean": mean}}, {}, volatile=[mean])
    assert writer.copying
    writer.wait_for_copies()
    w.add_(10)
    end.set()
    writer.save(2, {"model": {"w": w}}, {})
    writer.wait()
    names = ("copy", "stream", "__exit__", "write", "wait_stream", "wait_event")
    assert [one for one in cuda.mock_calls if one[0].rpartition(".")[2] in names] == [
        *(call.Stream().wait_stream(loop), call.stream(side), call.copy(1, True)),
        *(call.stream().__exit__(None, None, None), call.copy(2, True)),
        *(call.Stream().wait_stream(loop), call.current_stream().wait_event(event)),
        *(call.write([1.0]), call.Stream().wait_stream(loop), call.copy(11, True)),
        *(call.Stream().wait_stream(loop), call.write([11.0])),
    ]
    assert all(one.kwargs["pin_memory"] for one in cuda.allocate.mock_calls)


def test_weights_change_after_the_wait_for_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, order = (
        config(dataset(tmp_path / "data", 8, 4), tmp_path / "run", batch_size=4),
        mock.Mock(),
    )
    loop = trainer(run)
    monkeypatch.setattr(loop.saving, "writer", order)
    for name in ("backward", "update"):
        monkeypatch.setattr(loop.learner, name, getattr(order, name))
    loop.advance(loop.batches())
    loop.report.metrics.close()
    assert [one[0] for one in order.mock_calls] == ["backward", "wait_for_copies", "update"]


@contextlib.contextmanager
def full(size: int) -> Iterator[None]:
    """No file grows above this size in bytes, as on a full volume."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("earlier", [True, False])
def test_full_volume_is_reported_with_the_newest_checkpoint(writer: Writer, earlier: bool) -> None:
    if earlier:
        writer.save(7, weights(), {})
        writer.wait()
    with full(1 << 20):
        writer.save(8, weights(count=1 << 20), {})
        with pytest.raises(StorageError) as caught:
            writer.wait()
    remaining = "step 7 is the newest" if earlier else "none was saved before"
    assert f"cannot save a checkpoint in {writer.directory}: File too large; {remaining}" in str(
        caught.value
    )
    left = [path.name for path in writer.directory.iterdir()]
    assert left == (["step-00000007"] if earlier else [])
    writer.save(8, weights(count=1 << 20), {})
    assert saved(writer)["model"]["w"].shape == (1 << 20,)


def test_error_of_the_writer_is_raised_by_the_next_save(tmp_path: Path, writer: Writer) -> None:
    writer.save(1, weights(), {})
    writer.wait()
    writer.directory.rename(tmp_path / "moved")
    writer.directory.touch()  # a file is where the folder was
    writer.save(2, weights(), {})
    with pytest.raises(StorageError, match="cannot save a checkpoint"):
        writer.save(3, weights(), {})
    assert newest_valid(tmp_path / "moved") is not None
    writer.directory.unlink()
    writer.save(1, weights(), {"epoch": {1, 2}})
    with pytest.raises(StorageError, match="set is not JSON serializable; none was saved before"):
        writer.wait()


@pytest.mark.parametrize("part", ["model", "ema"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_saved(writer: Writer, part: str, value: float) -> None:
    finite = {"count": torch.ones(3, dtype=torch.int64), "b": torch.ones(3)}
    writer.save(1, {"model": finite, "ema": None}, {})
    weight = torch.ones(1000)
    weight[700] = value
    state: dict[str, Any] = {"model": finite, "ema": finite}
    writer.save(3, {**state, part: {**finite, "w": weight}}, {})
    with pytest.raises(JobError, match="after step 3 w is NaN or infinite"):
        writer.wait()
    assert [step_of(path) for path in steps(writer.directory)] == [1]
