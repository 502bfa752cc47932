"""Steps that need not import anew what others have imported: torch alone takes seconds.

Processes that have imported it stand by, and a step, its launcher and its ranks are forked from
them. What no server takes is started as ever, so this changes when a step begins and nothing else.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kfp_ddp.local import warm_client


class Stage(NamedTuple):
    """A process that stands by."""

    names: tuple[str, ...]
    """Components and modules that are forked from it."""
    modules: tuple[str, ...]
    """What it imports after the stages before it; none that is run as a program."""


ENGINES = {
    "data_sync": "datasets",
    "dataset_volume": "datasets.volume",
    "evaluate": "evaluation",
    "export": "export",
    "gate": "evaluation.gate",
    "preflight": "checks.preflight",
    "publish": "export.publish",
    "teardown": "runs.teardown",
    "train": "runs.train",
}
"""Rooms of the components' engines."""


def _engines(*names: str) -> tuple[str, ...]:
    return tuple(f"kfp_ddp.{ENGINES[name.replace('-', '_')]}.engine" for name in names)


_WAITING = ("preflight", "data_sync", "dataset_volume", "gate", "publish", "teardown")
_RANKS = ("kfp_ddp.training", "kfp_ddp.evaluation.rank")
_NODES = ("kfp_ddp.training.node", "kfp_ddp.evaluation.node")
STAGES = (
    Stage(_WAITING, ("kfp.dsl.executor", *_engines(*_WAITING))),
    Stage(("train", *_NODES), ("torch.distributed.run", "tyro", *_engines("train"))),
    Stage(
        ("evaluate", *_RANKS),
        (
            "kfp_ddp.training.prepare",
            "kfp_ddp.training.trainer",
            "torch._dynamo",  # an optimizer imports it
            "simplejpeg",
            "torchcodec",
            *_engines("evaluate"),
            "kfp_ddp.evaluation.predict",
        ),
    ),
    Stage(
        ("export",),
        (
            "torch.export._trace",
            "torch.onnx._internal.exporter._core",
            "onnxscript.function_libs.torch_lib.ops",
            "kfp_ddp.export.contents",
        ),
    ),
)


def stages_of(compiled: Path) -> tuple[Stage, ...]:
    """Those that a compiled pipeline has steps for, and what they stand on."""
    text = compiled.read_text(encoding="utf-8")
    used = [any(f"comp-{n.replace('_', '-')}:" in text for n in stage.names) for stage in STAGES]
    return STAGES[: len(used) - used[::-1].index(True)] if any(used) else ()


@contextmanager
def python(stages: tuple[Stage, ...]) -> Iterator[None]:
    """Let what `sys.executable` starts in the block be forked from servers, where it can be.

    Only on Linux: elsewhere frameworks of the system do not survive a fork.
    """
    with tempfile.TemporaryDirectory(prefix="kfp-ddp-warm-") as folder:
        longest = max((len(name) for stage in stages for name in stage.names), default=0)
        # KFP puts the path into a shell's line as it is; that of a socket has 107 bytes at most.
        fits = shlex.quote(folder) == folder and len(folder) + 1 + longest <= 107
        if sys.platform != "linux" or not stages or not fits:
            yield
            return
        cold, warm = sys.executable, Path(folder, "python")
        words = [cold, "-I", "-S", warm_client.__file__, folder, cold]
        warm.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        warm.chmod(0o700)
        read, write = os.pipe()
        server = subprocess.Popen(
            [cold, "-m", "kfp_ddp.local.warm_server", folder, str(read), json.dumps(stages)],
            stdin=subprocess.DEVNULL,
            pass_fds=[read],
        )
        os.close(read)
        sys.executable = str(warm)
        try:
            yield
        finally:
            sys.executable = cold
            os.close(write)
            server.wait()
