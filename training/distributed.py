"""The process group, and what the ranks must agree on; memory of the process."""

import contextlib
import ctypes
import datetime
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist

from kfp_ddp.core import machine
from kfp_ddp.core.errors import InputError, KfpDdpError, PeerLostError
from kfp_ddp.core.log import log
from kfp_ddp.core.run_folder import RunFolder

T = TypeVar("T")
ABORT_SECONDS = 20.0
"""Torch's launcher gives the other ranks of a node 30 seconds to end."""


@dataclass(frozen=True)
class World:
    """This process among the ranks of the run."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    """A gloo group for decisions on the CPU; None with a single rank."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self.rank == 0

    def print(self, line: str) -> None:
        """Print a line on rank 0."""
        if self.first:
            log.info(line)

    def seconds(self) -> float:
        """Return the time in seconds once the device has done all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def from_first(self, produce: Callable[[], T]) -> T:
        """Return on every rank what `produce` returns on rank 0; errors as in `raise_on_all`."""
        box: list[tuple[T | None, KfpDdpError | None]] = [(None, None)]
        if self.first:
            try:
                box = [(produce(), None)]
            except KfpDdpError as error:
                box = [(None, error)]
        if self.control is not None:
            dist.broadcast_object_list(box, src=0, group=self.control)
        value, problem = box[0]
        if problem is not None:
            self.raise_on_all(problem, 0)
        return value  # type: ignore[return-value]

    def raise_on_all(self, error: KfpDdpError, rank: int) -> NoReturn:
        """Raise the error on `rank`, and on other ranks a PeerLostError with its message."""
        if rank == self.rank:
            raise error
        raise PeerLostError(str(error)) from error

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of ranks."""
        if self.control is None:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values  # type: ignore[return-value]

    def to_first(self, value: T) -> list[T] | None:
        """Return the values of all ranks on rank 0, in the order of ranks; None on other ranks."""
        if self.control is None:
            return [value]
        values: list[T | None] | None = [None] * self.size if self.first else None
        dist.gather_object(value, values, dst=0, group=self.control)
        return values  # type: ignore[return-value]

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        if self.control is not None:
            dist.barrier(group=self.control)


class RankConfig(Protocol):
    """Settings that every program of ranks has, such as a TrainConfig."""

    @property
    def device(self) -> str:
        """auto, cuda, mps or cpu."""

    @property
    def timeout_minutes(self) -> float:
        """Timeout of a collective."""

    @property
    def output_dir(self) -> str:
        """Folder for logs of a failure."""


def start(config: RankConfig) -> World:
    """Join the process group of torchrun's environment, or be a single rank; raise InputError."""
    rank = int(os.environ.get("RANK", "0"))
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = _device(config, local_rank, local_size, size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        _flight_recorder(config)
    elif device.type == "cpu":
        keep_freed()
    if "RANK" not in os.environ or size == 1:
        return World(rank, size, local_rank, local_size, device)
    timeout = datetime.timedelta(minutes=config.timeout_minutes)
    if device.type == "cuda":
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup)  # every rank is a member
    return World(rank, size, local_rank, local_size, device, control)


def _flight_recorder(config: RankConfig) -> None:
    """Let NCCL record its last collectives and dump them on a timeout, for torchfrtrace."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    logs = RunFolder(config.output_dir).logs
    with contextlib.suppress(OSError):  # reported when the output folder is checked
        logs.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(logs / "nccl_trace_rank_"))


def alone(device: torch.device) -> World:
    """Return the world of a single process, which computes within the limits of its container."""
    torch.set_num_threads(min(torch.get_num_threads(), machine.threads()))
    return World(0, 1, 0, 1, device)


@contextlib.contextmanager
def joined(config: RankConfig) -> Iterator[World]:
    """Yield `start(config)`, and leave the process group at the end.

    NCCL's is aborted after an error: to destroy it would wait for peers that wait for this rank.
    """
    world = start(config)
    in_order = False
    try:
        yield world
        in_order = True
    finally:
        may_wait = in_order or world.device.type != "cuda"
        if dist.is_initialized() and may_wait:
            dist.destroy_process_group()
        elif dist.is_initialized():
            _abort()


def _abort() -> None:
    """Abort the exchanges of NCCL that wait for peers; not longer than `ABORT_SECONDS`.

    The caller ends the process soon, by which peers notice its end in the group of gloo.
    """
    assert dist.group.WORLD is not None
    # A stuck driver may block it, so it is a daemon thread: nothing waits for its end.
    thread = threading.Thread(target=dist.group.WORLD.abort, name="abort", daemon=True)
    thread.start()
    thread.join(ABORT_SECONDS)


def _device(config: RankConfig, local_rank: int, local_size: int, size: int) -> torch.device:
    requested = config.device
    if requested == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count() if requested in ("auto", "cuda") else 0
    apple = not gpus and requested != "cuda" and torch.backends.mps.is_available()
    if apple and size == 1:
        return torch.device("mps")
    if requested == "mps":
        if apple:
            raise InputError(
                f"an Apple GPU trains with one rank, not {size}: start one, or set device=cpu"
            )
        raise InputError(
            "device=mps was requested but this machine has no Apple GPU: set device=cpu"
        )
    if requested == "auto" and gpus == 0:
        return gpu_or_cpu()
    if gpus == 0:
        raise InputError(
            "device=cuda was requested but this machine has no GPU: "
            "request one for the job, or set device=cpu"
        )
    if local_size > gpus:
        raise InputError(
            f"{local_size} ranks on this machine but only {gpus} GPUs: "
            "lower the ranks per node, or set device=cpu"
        )
    return torch.device("cuda", local_rank)


def gpu_or_cpu() -> torch.device:
    """Return a GPU, or the CPU if there is none; raise InputError if this pod requested one."""
    wanted = os.environ.get(machine.GPUS)
    count = torch.cuda.device_count()
    if count:
        return torch.device("cuda")
    if not wanted:
        return torch.device("cpu")
    why = "no device"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        why = str(error).strip().partition("\n")[0]
    raise InputError(
        f"this pod requested {wanted} GPU(s), and torch sees none ({why}): set job.runtime_class "
        "(nvidia on k3s and RKE2; a step has none, so set its backend to pytorchjob), check the "
        "node's driver and device plugin, or set device=cpu"
    )


def half_precision(device: torch.device) -> Literal["bf16", "fp16", "fp32"]:
    """Return the fastest precision of a device for training: bf16, fp16 or fp32.

    bf16 needs compute capability 8.0. A GPU from 7.0 has tensor cores for fp16 alone, which needs a
    scaled loss.
    """
    if device.type != "cuda":
        return "fp32"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    tensor_cores = torch.cuda.get_device_capability(device) >= (7, 0)
    return "fp16" if tensor_cores else "fp32"


def number_format(precision: str) -> torch.dtype:
    """Return the number format in which a precision computes."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context in which a network computes in a precision."""
    kind = number_format(precision)
    return torch.autocast(device.type, kind, enabled=kind != torch.float32)


@dataclass
class Stop:
    """Agreement of the ranks to stop or save at a step boundary, if any rank requests it.

    An asynchronous all-reduce on the CPU, from before a step to after it: no step waits for it.
    """

    world: World
    reason: str = ""
    _flag: threading.Event = field(default_factory=threading.Event)
    _tensor: torch.Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.int32))
    _work: dist.Work | None = None

    def on_signals(self) -> None:
        """Request a stop on SIGTERM and SIGINT; does nothing outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda got, _: self.ask(signal.Signals(got).name))

    def ask(self, reason: str) -> None:
        """Request a stop of all ranks at the next step boundary."""
        self.reason = self.reason or reason
        self._flag.set()

    def post(self, save: bool, over: bool = False) -> None:
        """Send this rank's requests for a stop, a save or an early end, without waiting."""
        self._tensor[0] = self._flag.is_set()
        self._tensor[1] = save
        self._tensor[2] = over
        if self.world.control is not None:
            self._work = dist.all_reduce(
                self._tensor, dist.ReduceOp.MAX, group=self.world.control, async_op=True
            )

    def agreed(self) -> tuple[bool, bool, bool]:
        """Return whether any rank requested a stop, a save, or an early end; alike on all ranks."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        stop, save, over = map(bool, self._tensor.tolist())
        return stop, save, over


# Names of options in malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4


def keep_freed() -> None:
    """Let glibc keep freed memory for the next step, which allocates the same again.

    Otherwise the kernel clears 450,000 pages a step, a tenth of the time for ResNet-50 on batches
    of 32 photographs. Does nothing with another C library.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Let the caller decide when to collect: a full collection takes 0.2 s at any moment."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
