"""`python -m kfp_ddp.training.launch [torchrun flags] -- [training flags]`: the ranks of a node.

The torch elastic API with what the torchrun script lacks: exit codes that tell preemption (143)
from bad input (2) and failure, and one JSON line that names the first failing rank and its error.
"""

import argparse
import dataclasses
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from kfp_ddp.training.config import TrainConfig, parse
from kfp_ddp.training.errors import FULL, InputError, full
from kfp_ddp.training.watch import PARENT, Parent

TERMINATION_LOG = "/dev/termination-log"
"""Where Kubernetes reads a container's last words; at most 4,096 bytes."""
DEAF_SECONDS = 5.0
"""How long a signal may go unheard before this process ends without an orderly stop."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """The root cause of a run that did not end with 0."""

    exit_code: int
    rank: int
    error: str
    retryable: bool
    time: float = dataclasses.field(default_factory=time.time)
    """When, in seconds since 1970: of several nodes' failures the first is the cause."""
    consequence: bool = False
    """Whether it only says that another rank went away."""


def main(argv: Sequence[str] | None = None) -> int:
    """Launch, wait, and return 0 (done), 143 (preempted) or the exit code of the first failure."""
    parent = Parent()
    parent.on_gone = lambda: os.kill(os.getpid(), signal.SIGTERM)
    arguments = list(sys.argv[1:] if argv is None else argv)
    ours, flags = _split(arguments)
    try:
        config = parse(flags, prog="python -m kfp_ddp.training.launch [torchrun flags] --")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return _report(Failure(2, -1, str(error), False), None)
    return _launch(ours, config)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return [], arguments
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _check_ranks(args: argparse.Namespace, config: TrainConfig) -> None:
    """Refuse more ranks than there is work for, where their number is known before they start.

    Raises:
        InputError: the batch cannot be dealt to the ranks, or there are fewer images than ranks.
    """
    least, _, most = str(args.nnodes).rpartition(":")
    if (least and least != most) or not str(args.nproc_per_node).isdecimal():
        return  # elastic, or one for each GPU: the ranks find out
    ranks = int(most) * int(args.nproc_per_node)
    if not config.batch_size_per_rank:
        config.check_dealt(config.batch_size, config.micro_batch_size, ranks)
    from kfp_ddp.training import data

    split = Path(config.data) / "train"
    if data.count(split, most=ranks) < ranks:
        images = len(data.scan(split))
        raise InputError(
            f"{ranks} ranks but only {images} training images: use at most {images} ranks"
        )


def _launch(torchrun_flags: list[str], config: TrainConfig) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, without its warning
    args = run.get_args_parser().parse_args(
        [*torchrun_flags, "-m", "kfp_ddp.training", *config.to_argv()]
    )
    log_dir = _log_dir(args.log_dir, config)
    args.log_dir = str(log_dir)
    # On a shared volume each of several nodes has a file of its own.
    alone = _max_nodes(args.nnodes) == 1
    file = log_dir / ("failure.json" if alone else f"failure-{socket.gethostname()}.json")
    try:
        _check_ranks(args, config)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return _report(Failure(2, -1, str(error), False), file)
    nowhere = not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (args.rdzv_backend == "static" and nowhere and alone):
        args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"
        args.rdzv_id = str(uuid.uuid4())
    args.master_port = args.master_port or 29500
    least, _, most = str(args.nnodes).rpartition(":")
    if least and least != most:
        os.environ["KFP_DDP_ELASTIC"] = "1"
        args.max_restarts = args.max_restarts or 10  # each lost or joining node takes one
    args.role = "rank"
    launch, command, command_args = run.config_from_args(args)
    launch.logs_specs = _logs(args.log_dir)
    launch.signals_to_handle = "SIGQUIT"  # the others are ours, below
    launch.shutdown_timeout = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "90"))
    os.environ[PARENT] = str(os.getpid())

    heard = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        heard.set()
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)  # a second one must not end the orderly stop
        raise SignalException(f"got {signal.Signals(number).name}", signal.Signals(number))

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    _end_when_deaf(heard, file)
    try:
        elastic_launch(launch, command)(*command_args)
    except SignalException as error:
        line = f"stopped by {signal.Signals(error.sigval).name}"
        return _report(Failure(128 + error.sigval, -1, line, True), file)
    except ChildFailedError as error:
        return _report(_root_cause(error), file)
    except OSError as error:
        if error.errno not in FULL:
            raise
        return _report(Failure(2, -1, full(error, log_dir), False), file)
    return 0


def _logs(folder: str) -> Any:
    """Ranks write to files in `folder`, and so to our output, but tell their errors elsewhere.

    A volume that is full would otherwise hide why they ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

    class Logs(DefaultLogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            files = super().reify(envs)
            own = tempfile.mkdtemp(prefix="kfp-ddp-errors-")
            for rank in files.error_files:
                files.error_files[rank] = envs[rank]["TORCHELASTIC_ERROR_FILE"] = f"{own}/{rank}"
            return files

    return Logs(log_dir=folder, redirects=Std.ALL, tee=Std.ALL)


def _end_when_deaf(heard: threading.Event, file: Path) -> None:
    """End this process when it is told to and cannot hear it.

    A rendezvous with a node that is not there waits in C++ for minutes, and Python runs no
    handler meanwhile. No rank has started then, so there is nothing to stop in order; ranks that
    do run see that their parent is gone.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def watch() -> None:
        while number := os.read(read, 1):
            ends = number[0] in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            if ends and not heard.wait(DEAF_SECONDS):
                line = f"stopped by {signal.Signals(number[0]).name} before all nodes had met"
                os._exit(_report(Failure(128 + number[0], -1, line, True), file))

    threading.Thread(target=watch, daemon=True).start()


def _max_nodes(nnodes: str) -> int:
    """The upper end of "2" or "1:4"."""
    return int(str(nnodes).rpartition(":")[2])


def _log_dir(given: str | None, config: TrainConfig) -> Path:
    """A folder for the ranks' logs; where the output folder cannot be written a temporary one."""
    path = Path(given) if given else Path(config.output_dir) / "logs"
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "failure.json").unlink(missing_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="kfp-ddp-logs-"))
    return path


def _root_cause(error: Any) -> Failure:
    """The first failure that is no consequence of another one."""

    def order(rank: int) -> tuple[bool, float]:
        failure = error.failures[rank]
        data = failure.error_file_data
        ended_as_told = failure.exitcode in (143, -signal.SIGTERM)
        return (
            bool(data.get("consequence")) or ended_as_told,
            float(data.get("exact_time", failure.timestamp)),
        )

    rank = min(error.failures, key=order)
    consequence, at = order(rank)
    failure = error.failures[rank]
    code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    message = failure.error_file_data.get("message", {})
    line = message.get("message", "") if isinstance(message, dict) else ""
    if code == 143:
        line = "preempted; the newest checkpoint is durable"
    elif not line:
        line = f"ended by {failure.signal_name()}" if failure.exitcode < 0 else f"exit code {code}"
    return Failure(code, rank, line, code >= 128, at, consequence)


def _report(failure: Failure, file: Path | None) -> int:
    """Write the failure where the caller and Kubernetes look for it; returns its exit code."""
    line = json.dumps(dataclasses.asdict(failure))[:4000]
    targets = [file] if file else []
    if "KUBERNETES_SERVICE_HOST" in os.environ or "KFP_DDP_TERMINATION_LOG" in os.environ:
        targets.append(Path(os.environ.get("KFP_DDP_TERMINATION_LOG", TERMINATION_LOG)))
    for path in targets:
        try:
            path.write_text(line + "\n")
        except OSError as error:
            print(f"warning: cannot write {path}: {error.strerror}", file=sys.stderr)
    if failure.rank >= 0:
        print(f"rank {failure.rank}: {failure.error}", file=sys.stderr, flush=True)
    return failure.exit_code


if __name__ == "__main__":
    sys.exit(main())
