"""Kubeflow Pipelines components for PyTorch DDP training: bucket to evaluated, exported model."""

import os
import sys

# Before any other import, which may come from the current folder, or read the variables below.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    # Python is looking for a module, which follows this in the command line. If it is one of ours,
    # no other may come from the current folder, which may be a downloaded dataset.
    _program = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    if _program.partition(".")[0] == __name__:
        del sys.path[0]

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kfp_ddp.client.api import Client as Client

__version__ = "0.2.0"

# ONNX Runtime and MLflow would report each use to their makers.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")


def __getattr__(name: str) -> Any:
    """Import the Python API when it is used: each step imports this module."""
    if name != "Client":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kfp_ddp.client.api import Client

    return Client
