"""Run a compiled pipeline on this machine."""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

from kfp_ddp.pipelines.form import COMPILED


def pipeline(
    arguments: dict[str, Any], folder: Path, compiled: Path = COMPILED / "train_resnet.yaml"
) -> "subprocess.CompletedProcess[str]":
    """Run a compiled pipeline through kfp.local, with its folders below `folder`."""
    program = [sys.executable, "-m", "kfp_ddp.local.pipeline"]
    inputs = [json.dumps(arguments), str(folder / "artifacts"), str(compiled), secrets.token_hex(8)]
    return subprocess.run(
        [*program, *inputs],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "KFP_DDP_DATA_DIR": str(folder / "data"),
            "KFP_DDP_WORK_DIR": str(folder / "work"),
        },
    )
