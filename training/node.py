"""`python -m kfp_ddp.training.node [torchrun flags] -- [training flags]`: the ranks of a node.

Unlike torchrun it exits with 143 if preempted, 2 for invalid input, and prints the cause as JSON.
"""

import argparse
import atexit
import contextlib
import functools
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from kfp_ddp.core import machine
from kfp_ddp.core.errors import FULL, PREEMPTED, InputError, KfpDdpError, StorageError, full
from kfp_ddp.core.failure import Failure, cause_in_error_files, final_failure, report
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.text import from_json
from kfp_ddp.training.spec import batches
from kfp_ddp.training.spec.config import TrainConfig, parse
from kfp_ddp.training.watch import FINAL, LAUNCH, PARENT, RESTARTS, Parent

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
UNRESPONSIVE_SECONDS = 5.0
"""Seconds without a response to a signal, after which this process exits at once."""
NUMA = Path("/sys/devices/system/node")
PROGRAM = "python -m kfp_ddp.training.node [torchrun flags] --"


def main() -> int:
    """Train; return 0 (done), 143 (preempted) or the exit code of the first failure."""
    return run_node(lambda torchrun, flags: train(torchrun, parse(flags, prog=PROGRAM)))


def run_node(work: Callable[[list[str], list[str]], int]) -> int:
    """Return what `work` returns for the flags before and after `--`; report errors as of ranks."""
    Parent().on_gone = lambda: os.kill(os.getpid(), signal.SIGTERM)
    for number in STOPS:
        signal.signal(number, signal.default_int_handler)
    argv = sys.argv[1:] if "--" in sys.argv else ["--", *sys.argv[1:]]
    at = argv.index("--")
    try:
        return work(argv[:at], argv[at + 1 :])
    except KeyboardInterrupt:
        return report(Failure(PREEMPTED, -1, "stopped before the ranks started", True), None)
    except KfpDdpError as error:
        retryable = error.retryable or not isinstance(error, InputError)
        return report(Failure(error.exit_code, -1, str(error), retryable), None)


def train(
    torchrun: Sequence[str], config: TrainConfig, finish: Callable[[], None] = lambda: None
) -> int:
    """Train with the ranks of this node; see `launch`."""
    metrics = RunFolder(config.output_dir).metrics
    earlier = 0
    with contextlib.suppress(OSError):
        earlier = metrics.stat().st_size
    return launch(
        torchrun,
        ["kfp_ddp.training", *config.to_argv()],
        Path(config.output_dir),
        check=lambda args: _check_ranks(args, config),
        summary=lambda: _last_checkpoint(metrics, earlier),
        finish=finish,
    )


def _check_ranks(args: argparse.Namespace, config: TrainConfig) -> None:
    """Raise InputError for too many ranks, if their number is known before they start."""
    if config.script:
        return
    if not str(args.nproc_per_node).isdecimal():
        return  # one for each GPU: the ranks check it
    ranks = _nodes(args.nnodes) * int(args.nproc_per_node)
    if config.is_set("batch_size") and not config.batch_size_per_rank:
        batches.check_divides(config.batch_size, config.micro_batch_size, ranks)
    from kfp_ddp.pictures import splits

    data = Path(config.data)
    plenty = 100 * ranks  # so many are enough for all ranks, and a list of them takes long
    if splits.count_images(data, most=plenty) < plenty:
        train = splits.splits_of(data, config.layout_rule).train
        batches.check_one_each(len(train), ranks)


def launch(
    torchrun_flags: Sequence[str],
    program: Sequence[str],
    output_dir: Path,
    *,
    check: Callable[[argparse.Namespace], None],
    summary: Callable[[], str],
    finish: Callable[[], None] = lambda: None,
) -> int:
    """Start the ranks of this node, wait, and return 0, 143 if stopped, or the first exit code.

    InputError for a number of nodes that is not fixed.
    Signals are ignored afterwards; a thread calls `finish` if this cannot return after a signal.
    """
    from torch.distributed import run

    args = run.get_args_parser().parse_args([*torchrun_flags, "-m", *program])
    nodes = _nodes(args.nnodes)
    log_dir = _log_dir(args.log_dir, output_dir)
    args.log_dir = str(log_dir)
    # On a shared volume each of several nodes has its own file.
    name = "failure.json" if nodes == 1 else f"failure-{socket.gethostname()}.json"
    file = log_dir / name
    try:
        check(args)
        _complete(args, nodes)
        return _supervise(args, summary, file, finish)
    except KfpDdpError as error:
        return report(Failure(error.exit_code, -1, str(error), error.retryable), file)
    finally:
        _ignore_signals()


def _complete(args: argparse.Namespace, nodes: int) -> None:
    """Set what torchrun would set or leaves open, and pass it to the ranks."""
    if args.standalone or nodes == 1:
        args.rdzv_backend = "c10d"
        args.rdzv_id = str(uuid.uuid4())
        # Its own name, and the address that this has, may be of no use: renamed, offline, in a VPN.
        args.rdzv_endpoint = "127.0.0.1:0"
        args.local_addr = "127.0.0.1"
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")
        if loopback:
            os.environ.update({"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback})
    os.environ["PYTHONSAFEPATH"] = "1"  # torch starts each rank by the name of its module
    args.master_port = args.master_port or 29500
    args.role = "rank"
    os.environ.update({PARENT: str(os.getpid()), LAUNCH: uuid.uuid4().hex})
    if args.max_restarts:
        os.environ[RESTARTS] = str(args.max_restarts)
        # torch reuses one store for all starts: ranks would find addresses of the previous start.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


def _supervise(
    args: argparse.Namespace, summary: Callable[[], str], file: Path, finish: Callable[[], None]
) -> int:
    """Start the ranks, wait, and return the exit code; the cause of a failure is in `file`."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    ranks = run.determine_local_world_size(args.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(machine.threads(ranks)))
    settings, command, command_args = run.config_from_args(args)
    settings.logs_specs = logs = _logs(args.log_dir)
    settings.numa_options = settings.numa_options or _near_gpus(ranks)
    settings.signals_to_handle = "SIGQUIT"  # the others are handled below
    settings.shutdown_timeout = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "90"))
    _stop_on_signals(file, finish)
    try:
        elastic_launch(settings, command)(*command_args)
    except SignalException as error:
        remaining = summary()
        line = f"stopped by {signal.Signals(error.sigval).name}; {remaining}"
        stopped = Failure(128 + error.sigval, -1, line, True)
        return report(final_failure(logs.errors, remaining) or stopped, file)
    except ChildFailedError as error:
        return report(cause_in_error_files(error, summary()), file)
    except Exception as error:  # noqa: BLE001  any error is reported in one line
        if isinstance(error, OSError) and error.errno in FULL:
            raise StorageError(full(error, args.log_dir)) from None
        traceback.print_exception(error)
        lines = str(error).strip().splitlines()
        line = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        return report(Failure(1, -1, line, retryable=True), file)
    return 0


def _near_gpus(ranks: int) -> Any:
    """Return torch's option for ranks on the CPUs near their GPUs; None if others would idle."""
    from torch.numa import binding

    if len(list(NUMA.glob("node[0-9]*"))) < 2 or not shutil.which("numactl"):
        return None
    options = binding.NumaOptions(binding.AffinityMode.NODE, should_fall_back_if_binding_fails=True)
    cpus_of = functools.partial(binding._get_logical_cpus_to_bind_to, numa_options=options)
    with contextlib.suppress(Exception):  # no GPU for each rank, or it is not known where they are
        near = set().union(*(cpus_of(device_index=rank) for rank in range(ranks)))
        return options if near == os.sched_getaffinity(0) else None


def _ignore_signals() -> None:
    for number in (*STOPS, FINAL):
        signal.signal(number, signal.SIG_IGN)


def _stop_on_signals(file: Path, finish: Callable[[], None]) -> None:
    """Let the first signal raise torch's SignalException, which stops the ranks in order."""
    from torch.distributed.elastic.multiprocessing import SignalException

    handled = threading.Event()
    ending = threading.Lock()

    def stop(number: int, frame: FrameType | None) -> None:
        _ignore_signals()  # a second one must not interrupt the stop
        with ending:
            handled.set()
        cause = signal.SIGTERM if number == FINAL else signal.Signals(number)
        raise SignalException(f"got {signal.Signals(number).name}", cause)

    for number in (*STOPS, FINAL):
        signal.signal(number, stop)
    _exit_when_unresponsive(handled, ending, file, finish)


def _last_checkpoint(metrics: Path, earlier: int) -> str:
    """Describe the last checkpoint by the end of the metrics after byte `earlier`."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(earlier, file.seek(0, os.SEEK_END) - 4096))
            last = from_json(file.read().splitlines()[-1])
        if last["event"] == "end":
            return f"the checkpoint of step {last['step']} is durable"
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return "no checkpoint was saved on stop; the newest one is from before"


def _logs(folder: str) -> Any:
    """Let ranks log to files and our output, but their errors elsewhere: a volume may be full."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

    class Logs(DefaultLogsSpecs):
        errors: tuple[Path, ...] = ()

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            files = super().reify(envs)
            own = tempfile.mkdtemp(prefix="kfp-ddp-errors-")
            atexit.register(shutil.rmtree, own, ignore_errors=True)
            for rank in files.error_files:
                files.error_files[rank] = envs[rank]["TORCHELASTIC_ERROR_FILE"] = f"{own}/{rank}"
            self.errors = tuple(Path(path) for path in files.error_files.values())
            return files

    return Logs(log_dir=folder, redirects=Std.ALL, tee=Std.ALL)


def _exit_when_unresponsive(
    handled: threading.Event, ending: threading.Lock, file: Path, finish: Callable[[], None]
) -> None:
    """Exit at a signal whose handler does not run: a rendezvous waits in C++ for minutes."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def watch() -> None:
        while number := os.read(read, 1):
            if number[0] not in STOPS or handled.wait(UNRESPONSIVE_SECONDS):
                continue
            with ending:  # a handler that runs only now waits for our exit
                if handled.is_set():
                    return
                line = f"stopped by {signal.Signals(number[0]).name} before all nodes had joined"
                code = report(Failure(128 + number[0], -1, line, True), file)
                try:
                    finish()
                finally:
                    os._exit(code)

    threading.Thread(target=watch, daemon=True).start()


def _nodes(nnodes: str) -> int:
    """Return the number of nodes of "2" or "2:2"; InputError for one that is not fixed."""
    least, _, most = str(nnodes).rpartition(":")
    if not most.isdecimal() or least not in ("", most):
        raise InputError(
            f"--nnodes {nnodes} is not one number, and nodes cannot join or leave a run: give the "
            "number of nodes; after a lost node start all of them again, from the newest checkpoint"
        )
    return int(most)


def _log_dir(chosen: str | None, output_dir: Path) -> Path:
    """Return the ranks' log folder, without old failures; temporary if it cannot be written."""
    path = Path(chosen) if chosen else RunFolder(output_dir).logs
    try:
        path.mkdir(parents=True, exist_ok=True)
        for earlier in path.glob("failure*.json"):
            earlier.unlink(missing_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="kfp-ddp-logs-"))
    return path


if __name__ == "__main__":
    sys.exit(main())
