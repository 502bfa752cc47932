"""A GPU, which no machine of a test has: the CPU computes, and what a host would wait for is told.

What is meant for the GPU is known by its storage. Host and GPU may meet in copies only; reading a
value, or copying without pinned memory and non_blocking, makes the host wait. Streams order what
is computed on them as CUDA's do: what one wrote another may read after it waited, and must record.
"""

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from kfp_ddp.training import config

GPU = torch.device("cuda", 0)
OURS = str(Path(config.__file__).parent)
READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Tags of the kernels whose host part needs a value from the GPU."""
DEVICE, IS_CUDA = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class Stream:
    """A stream, and how much of each other one it has waited for."""

    def __init__(self, device: object = None) -> None:
        self.behind: dict[Stream, int] = {}
        self.done = -1

    def wait_stream(self, other: "Stream") -> None:
        """All that is in `other` by now comes before what follows here."""
        self.behind[other] = Memory.clock


class Memory:
    """What lies on the GPU: storages, and by which stream each was written when."""

    clock = 0

    def __init__(self) -> None:
        self.main = self.stream = Stream()
        self.written: dict[int, tuple[StorageWeakRef, Stream, Stream, int]] = {}
        self.recorded: set[tuple[int, Stream]] = set()
        self.pinned: dict[int, StorageWeakRef] = {}

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor lies on the GPU."""
        key = tensor.untyped_storage()._cdata
        entry = self.written.get(key)
        if entry is not None and _gone(entry[0]):
            del self.written[key]
            return False
        return entry is not None

    def write(self, tensor: Tensor) -> None:
        """The current stream writes to the tensor, which lies on the GPU from now on."""
        storage = tensor.untyped_storage()
        maker = self.written[storage._cdata][2] if self.holds(tensor) else self.stream
        if maker is self.stream and not self.holds(tensor):
            self.recorded -= {(storage._cdata, stream) for stream in (self.main, self.stream)}
        Memory.clock += 1
        entry = (_weakly(storage), self.stream, maker, Memory.clock)
        self.written[storage._cdata] = entry

    def read(self, tensor: Tensor) -> None:
        """The current stream needs what the tensor holds."""
        key = tensor.untyped_storage()._cdata
        _, writer, maker, when = self.written[key]
        done = max(self.stream.behind.get(writer, -1), writer.done)
        if writer is not self.stream and done < when:
            raise AssertionError("a stream reads what another may not have written yet")
        if maker not in (self.main, self.stream) and (key, self.stream) not in self.recorded:
            raise AssertionError("memory of another stream is used and not recorded")

    def record(self, tensor: Tensor, stream: Stream) -> None:
        """Tensor.record_stream."""
        self.recorded.add((tensor.untyped_storage()._cdata, stream))

    def pin(self, tensor: Tensor) -> Tensor:
        """The tensor, whose pages are locked."""
        storage = tensor.untyped_storage()
        self.pinned[storage._cdata] = _weakly(storage)
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether the GPU copies from or to it by itself."""
        found = self.pinned.get(tensor.untyped_storage()._cdata)
        return found is not None and not _gone(found)


class Calls(TorchFunctionMode):
    """Lets what is meant for the GPU be made on the CPU, and keeps account of where it is meant."""

    def __init__(self, gpu: "Gpu") -> None:
        super().__init__()
        self.gpu, self.memory = gpu, gpu.memory

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, memory = dict(kwargs or {}), self.memory
        if function in (torch.device, torch._C._nn._parse_to):
            return function(*args, **kwargs)
        if function == DEVICE and memory.holds(args[0]):
            return GPU
        if function == IS_CUDA:
            return memory.holds(args[0])
        name = getattr(function, "__name__", "")
        if name == "is_pinned":
            return memory.is_pinned(args[0])
        if name in ("tolist", "numpy") and memory.holds(args[0]):
            self.gpu.wait(name)
        if name == "copy_":
            return self._copied(args, kwargs)
        target = next((one for one in [*args, *kwargs.values()] if is_device(one)), None)
        if name in ("to", "cpu", "cuda"):
            return self._moved(function, name, target, args, kwargs)
        pinning = kwargs.pop("pin_memory", False) or name == "pin_memory"
        if target is not None:
            args = tuple(_on_cpu(one) for one in args)
            kwargs = {key: _on_cpu(one) for key, one in kwargs.items()}
        on_gpu = target is not None and torch.device(target).type == "cuda"
        if name == "__deepcopy__" and memory.holds(args[0]):
            on_gpu = True
            with self.gpu.copying():
                made = function(*args, **kwargs)
        else:
            made = function(*args, **kwargs) if name != "pin_memory" else args[0].clone()
        if on_gpu and isinstance(made, Tensor):
            memory.write(made)
            if name in ("tensor", "as_tensor"):
                self.gpu.wait(f"torch.{name} on the GPU")
        return memory.pin(made) if pinning else made

    def _moved(self, function: Any, name: str, target: Any, args: Any, kwargs: Any) -> Any:
        target = {"cpu": "cpu", "cuda": "cuda"}.get(name, target)
        there = self.memory.holds(args[0])
        goes = there if target is None else torch.device(target).type == "cuda"
        args = tuple(_on_cpu(one) for one in args)
        kwargs = {key: _on_cpu(one) for key, one in kwargs.items()}
        if name != "to":
            function, args = torch.Tensor.to, (args[0], torch.device("cpu"))
        if goes == there:
            return function(*args, **kwargs)
        free = kwargs.get("non_blocking") or any(one is True for one in args[1:])
        with self.gpu.copying():
            made = function(*args, **{**kwargs, "copy": True})
        if goes:
            self.memory.write(made)
        if there or not (free and self.memory.is_pinned(args[0])):
            self.gpu.wait("a copy from the GPU" if there else "a copy of memory that is not pinned")
        return made

    def _copied(self, args: Any, kwargs: Any) -> Any:
        into, source = args[:2]
        ends = (self.memory.holds(into), self.memory.holds(source))
        if ends[0] == ends[1]:
            return into.copy_(*args[1:], **kwargs)
        free = kwargs.get("non_blocking") or any(one is True for one in args[1:])
        if not (free and self.memory.is_pinned(source if ends[0] else into)):
            self.gpu.wait("copy_ between host and GPU")
        with self.gpu.copying():
            return into.copy_(*args[1:], **kwargs)


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each kernel: one of the GPU takes tensors of the GPU alone and makes such."""

    def __init__(self, gpu: "Gpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gpu, self.memory = gpu, gpu.memory

    def __torch_dispatch__(
        self, kernel: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)]
        there = [one for one in given if self.memory.holds(one)]
        if not there or self.gpu.copies:
            return kernel(*args, **kwargs)
        if "out" in kwargs and not self.memory.holds(kwargs["out"]):
            self.memory.write(kwargs["out"])  # made in C++, as DDP's buckets are
        name = str(kernel)
        indexes = name.startswith(("aten.index.", "aten.index_put", "aten._index_put"))
        masks = indexes and any(one.dtype == torch.bool for one in given[1:])
        mixed = [one for one in given if one.ndim and not self.memory.holds(one)]
        if mixed and not indexes:
            raise RuntimeError(f"{name}: tensors of the GPU and of the host are mixed")
        if masks or mixed or any(tag in kernel.tags for tag in READS):
            self.gpu.wait(name)
        for one in there:
            self.memory.read(one)
        made = kernel(*args, **kwargs)
        self.gpu.kernels += 1
        for one in tree_iter(made):
            if isinstance(one, Tensor) and (not self.memory.holds(one) or _writes(kernel)):
                self.memory.write(one)
        return made


class Gpu:
    """The GPU of a test."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.kernels = 0
        self.copies = False
        self.waits: list[str] = []
        """What the host waited for, each with the line of ours that did."""

    def wait(self, what: str) -> None:
        """The host waits for the GPU."""
        lines = [frame for frame in traceback.extract_stack() if frame.filename.startswith(OURS)]
        self.memory.stream.done = Memory.clock
        where = f"{Path(lines[-1].filename).name}:{lines[-1].name}" if lines else "not in training/"
        self.waits.append(f"{where}: {what}")

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Here a copy between host and GPU is made."""
        self.copies = True
        try:
            yield
        finally:
            self.copies = False

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """torch.cuda.stream."""
        before, self.memory.stream = self.memory.stream, stream
        try:
            yield
        finally:
            self.memory.stream = before


class Event:
    """A mark in a stream; none is reached before the host has waited for the GPU once more."""

    def __init__(self, gpu: Gpu, enable_timing: bool = False) -> None:
        self.gpu = gpu

    def record(self, stream: Stream | None = None) -> None:
        """Put it into the stream."""
        self.at = len(self.gpu.waits)

    def query(self) -> bool:
        """Whether the GPU is there."""
        return self.at < len(self.gpu.waits)

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds; as CUDA's, an error where the GPU may not be there yet."""
        if not end.query():
            raise RuntimeError("device not ready")
        return 1.0

    def synchronize(self) -> None:
        """Wait until the GPU is there."""
        self.gpu.wait("an event")


@contextlib.contextmanager
def pretended() -> Iterator[Gpu]:
    """A machine with one GPU."""
    gpu, real, group = Gpu(), torch.autocast, torch._C._group_tensors_by_device_and_dtype

    def autocast(device_type: str, dtype: torch.dtype, enabled: bool = True) -> Any:
        return real("cpu", dtype, enabled=enabled)

    def grouped(tensors: list[list[Tensor | None]], with_indices: bool = False) -> Any:
        found = group(tensors, with_indices)
        there = any(one is not None and gpu.memory.holds(one) for one in tensors[0])
        return {(GPU if there else key[0], key[1]): value for key, value in found.items()}

    replaced: dict[str, Any] = {
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_name": lambda device=None: "a pretended GPU",
        "set_device": lambda device: None,
        "manual_seed": lambda seed: None,
        "max_memory_allocated": lambda device=None: 10**9,
        "max_memory_reserved": lambda device=None: 2 * 10**9,
        "Stream": Stream,
        "stream": gpu.on,
        "current_stream": lambda device=None: gpu.memory.stream,
        "synchronize": lambda device=None: gpu.wait("torch.cuda.synchronize"),
        "Event": type("Event", (Event,), {"__init__": lambda self, **_: Event.__init__(self, gpu)}),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in replaced.items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch, "autocast", autocast)
        looks = "_accelerator_graph_capture_health_check"
        patch.setattr(torch.optim.Optimizer, looks, lambda optimizer: None)
        patch.setattr(torch._C, "_group_tensors_by_device_and_dtype", grouped)
        patch.setattr(torch.Tensor, "record_stream", lambda *given: gpu.memory.record(*given))
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        with Calls(gpu), Kernels(gpu):
            yield gpu


def _weakly(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


def is_device(one: object) -> bool:
    """Whether an argument names a device."""
    return isinstance(one, torch.device) or (
        isinstance(one, str) and one.partition(":")[0] in ("cuda", "cpu", "meta")
    )


def _on_cpu(one: Any) -> Any:
    return torch.device("cpu") if is_device(one) and torch.device(one).type == "cuda" else one


def _writes(kernel: Any) -> bool:
    return any(found.alias_info and found.alias_info.is_write for found in kernel._schema.arguments)
