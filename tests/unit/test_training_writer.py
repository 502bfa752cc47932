"""What a save copies and when, in buffers that are kept, and what it says where it fails."""

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kfp_ddp.core.errors import InputError, JobError, StorageError
from kfp_ddp.training import checkpoint
from kfp_ddp.training.checkpoint import (
    Writer,
    load_model,
    manifest_of,
    newest_valid,
    set_aside,
    steps,
)
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.manifest import MANIFEST, STATE
from kfp_ddp.training.model import MEAN, STD, build
from kfp_ddp.training.model_file import pack


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "checkpoints", keep=2)


def saved(writer: Writer) -> Any:
    """The state of the newest checkpoint."""
    writer.wait()
    newest = newest_valid(writer.directory)
    assert newest is not None
    return newest.state()


def test_only_what_is_volatile_is_copied_before_the_loop_goes_on(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What changes before `copied` is set shows what was not copied yet."""
    begin, fill = threading.Event(), Writer._fill_later

    def late(writer: Writer) -> None:
        assert begin.wait(30)
        fill(writer)

    monkeypatch.setattr(Writer, "_fill_later", late)
    tensors = [torch.full((3,), float(number)) for number in range(4)]
    state = {"model": {"w": tensors[0], "s": tensors[1]}, "groups": [tensors[2], (tensors[3],)]}
    writer.save(1, state, {}, volatile=[tensors[1]])
    assert not writer.copied.is_set()
    for tensor in tensors:
        tensor += 10
    begin.set()
    found = saved(writer)
    assert writer.copied.is_set()
    assert found["model"]["w"].tolist() == [10.0] * 3
    assert found["model"]["s"].tolist() == [1.0] * 3
    assert found["groups"][0].tolist() == [12.0] * 3
    assert found["groups"][1][0].tolist() == [13.0] * 3


def test_all_is_copied_at_once_where_nothing_is_told_of_it(writer: Writer) -> None:
    tensors = [torch.full((3,), float(number)) for number in range(3)]
    writer.save(1, {"model": {"w": tensors[0]}, "groups": [tensors[1], (tensors[2], "x", 5)]}, {})
    for tensor in tensors:
        tensor += 10
    found = saved(writer)
    assert found["model"]["w"].tolist() == [0.0] * 3
    assert found["groups"][0].tolist() == [1.0] * 3
    assert found["groups"][1][0].tolist() == [2.0] * 3
    assert found["groups"][1][1:] == ["x", 5]


def test_buffers_are_kept_for_the_next_save_of_the_same_shape_and_type(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.Tensor] = []
    empty_like = torch.empty_like

    def note(value: torch.Tensor, **how: Any) -> torch.Tensor:
        made.append(value)
        return empty_like(value, **how)

    monkeypatch.setattr(torch, "empty_like", note)
    for step, (value, buffers) in enumerate(
        [
            (torch.ones(3), 1),
            (torch.zeros(3), 1),
            (torch.ones(4), 2),
            (torch.ones(4, dtype=torch.int64), 3),
            (torch.zeros(4, dtype=torch.int64), 3),
        ]
    ):
        writer.save(step, {"model": {"w": value}}, {})
        found = saved(writer)["model"]["w"]
        assert (found.tolist(), found.dtype) == (value.tolist(), value.dtype)
        assert len(made) == buffers


@contextmanager
def full(size: int) -> Iterator[None]:
    """No file grows above so many bytes, as on a volume that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("before", [True, False])
def test_a_save_that_fails_says_what_the_volume_said_and_what_is_kept(
    writer: Writer, before: bool
) -> None:
    if before:
        writer.save(7, {"model": {"w": torch.ones(3)}}, {})
        writer.wait()
    with full(1 << 20):
        writer.save(8, {"model": {"w": torch.ones(1 << 20)}}, {})
        with pytest.raises(StorageError) as caught:
            writer.wait()
    kept = "step 7 is the newest" if before else "none was saved before"
    assert str(caught.value) == (
        f"cannot save a checkpoint in {writer.directory}: File too large; {kept}; "
        "make room or repair the volume and start again to resume"
    )
    left = [path.name for path in writer.directory.iterdir()]
    assert left == (["step-00000007"] if before else [])
    writer.save(8, {"model": {"w": torch.ones(1 << 20)}}, {})
    assert saved(writer)["model"]["w"].shape == (1 << 20,)


def test_a_save_that_fails_on_a_volume_that_cannot_be_read_says_so(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to itself (ELOOP) stands for ESTALE and EIO, which no real part gives on demand."""
    monkeypatch.setattr(checkpoint, "_PAUSES_S", ())
    writer.directory.symlink_to(writer.directory.name)
    writer.save(1, {"model": {"w": torch.ones(3)}}, {})
    with pytest.raises(StorageError, match="those saved before cannot be read now; make room"):
        writer.wait()


def test_an_error_that_no_disk_told_is_told_in_its_own_words(writer: Writer) -> None:
    writer.save(1, {"model": {"w": torch.ones(3)}}, {"epoch": {1, 2}})
    with pytest.raises(StorageError, match="set is not JSON serializable; none was saved before"):
        writer.wait()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_value_of_many_that_is_no_number_is_found(writer: Writer, value: float) -> None:
    weight = torch.ones(1000)
    weight[700] = value
    whole = {"count": torch.ones(3, dtype=torch.int64), "b": torch.ones(3)}
    writer.save(3, {"model": {**whole, "w": weight}, "ema": None}, {})
    with pytest.raises(JobError, match="after step 3 w is NaN or infinite"):
        writer.wait()
    assert not steps(writer.directory)


def test_without_a_whole_one_every_step_is_set_aside_and_what_was_left_goes(
    writer: Writer,
) -> None:
    for step in (0, 1, 20):
        path = checkpoint.write(writer.directory, step, {"model": {}}, {})
        (path / STATE).write_bytes(b"torn")
    (writer.directory / "corrupt-step-00000020").mkdir()
    (writer.directory / "corrupt-step-00000020" / STATE).touch()
    (writer.directory / ".step-00000030.tmp").touch()
    (writer.directory / ".step-00000040.tmp").mkdir()
    shunned = set_aside(writer.directory, None)
    assert [path.name for path in shunned] == ["step-00000020", "step-00000001", "step-00000000"]
    there = sorted(path.name for path in writer.directory.iterdir())
    assert [name for name in there if not name.endswith(".tmp")] == [
        "corrupt-step-00000000",
        "corrupt-step-00000001",
        "corrupt-step-00000020",
    ]
    assert ".step-00000040.tmp" not in there
    assert (writer.directory / "corrupt-step-00000020" / STATE).read_bytes() == b"torn"


def test_what_a_killed_save_left_is_no_part_of_the_next(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "yet"
    checkpoint.write(directory, 1, {"model": {}}, {})
    (directory / ".step-00000002.tmp").mkdir()
    (directory / ".step-00000002.tmp" / "left").touch()
    path = checkpoint.write(directory, 2, {"model": {}}, {})
    assert sorted(each.name for each in path.iterdir()) == sorted([MANIFEST, STATE])


def test_a_network_is_made_again_as_it_was_set(tmp_path: Path) -> None:
    settings = {"data": "/d", "output_dir": str(tmp_path), "image_size": 16}
    config = TrainConfig.create(**settings, model="cifar_resnet8", blur_pool=True)
    network, about = build("cifar_resnet8", 2, blur_pool=True), manifest_of(config, ("a", "b"))
    state = {"model": network.state_dict(), "ema": None}
    loaded, info = load_model(checkpoint.write(tmp_path, 1, state, about))
    assert list(map(repr, loaded.modules())) == list(map(repr, network.eval().modules()))
    assert (info.mean, info.std, info.image_size) == (MEAN, STD, 16)
    of_file = "from torch.nn import Flatten\n\n\ndef model(classes):\n    return Flatten(classes)\n"
    (tmp_path / "mine.py").write_text(of_file)
    own = replace(info, model="mine.py:model", config={"model_code": pack(tmp_path / "mine.py")})
    assert isinstance(own.network(), torch.nn.Flatten)
    sized = replace(info, model="vit_b_32", image_size=64, config={})
    with torch.device("meta"):
        assert sized.network().image_size == 64


def test_weights_of_another_network_are_told_with_their_place(tmp_path: Path) -> None:
    config = TrainConfig.create(data="/d", output_dir=str(tmp_path), model="cifar_resnet8")
    state = {"model": build("cifar_resnet14", 2).state_dict(), "ema": None}
    path = checkpoint.write(tmp_path, 1, state, manifest_of(config, ("a", "b")))
    with pytest.raises(InputError, match=f"{path} do not fit a cifar_resnet8"):
        load_model(path)


def test_of_older_ones_those_that_are_spared_stay(writer: Writer) -> None:
    for step in (1, 2, 3, 4):
        writer.save(step, {"model": {"w": torch.ones(3)}}, {}, spared=(1,))
    writer.wait()
    assert [path.name for path in steps(writer.directory)] == [
        "step-00000004",
        "step-00000003",
        "step-00000001",
    ]
