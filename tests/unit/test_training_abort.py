"""How a rank leaves its process group."""

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from kfp_ddp.core.errors import InputError
from kfp_ddp.training import distributed
from tests.training_ranks import run


class Group:
    """A process group of NCCL that records how it is left, and hangs if it is to."""

    def __init__(self, block: Callable[[], object]) -> None:
        self.block = block
        self.ends: list[str] = []

    def abort(self) -> None:
        self.ends.append("abort")
        self.block()

    def destroy(self) -> None:
        self.ends.append("destroy")


@pytest.mark.parametrize(
    ("device", "fails", "end"),
    [
        *(("cuda", True, "abort"), ("cuda", False, "destroy")),
        *(("cpu", True, "destroy"), ("cpu", False, "destroy")),
    ],
)
@pytest.mark.parametrize("hangs", [False, True])
def test_after_an_error_nccl_is_aborted_and_never_waited_for(
    device: str, fails: bool, end: str, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    group = Group(never.wait if hangs else lambda: None)
    world = distributed.World(0, 2, 0, 2, torch.device(device))
    monkeypatch.setattr(distributed, "start", lambda _: world)
    monkeypatch.setattr(distributed, "ABORT_SECONDS", 0.05)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", group.destroy)
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=group))

    def leave() -> None:
        with distributed.joined(run()):
            if fails:
                raise InputError("bad")

    try:
        if fails:
            with pytest.raises(InputError, match="bad"):
                leave()
        else:
            leave()
        assert group.ends == [end]
    finally:
        never.set()
