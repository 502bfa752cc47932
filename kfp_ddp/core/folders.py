"""Where the claims are mounted, and where there is room of the pod's own."""

import os
import tempfile

DATA_VARIABLE = "KFP_DDP_DATA_DIR"
WORK_VARIABLE = "KFP_DDP_WORK_DIR"
SCRATCH_VARIABLE = "KFP_DDP_SCRATCH_DIR"
SCRATCH = "/scratch"
"""Where pipelines mount an emptyDir in steps and workers that work without a claim."""


def data_dir(given: str = "") -> str:
    """The folder of the data claim: what was given, else KFP_DDP_DATA_DIR, else /data."""
    return given or os.environ.get(DATA_VARIABLE) or "/data"


def work_dir(given: str = "") -> str:
    """The folder of the work claim, or an address: given, else KFP_DDP_WORK_DIR, else /work."""
    return given or os.environ.get(WORK_VARIABLE) or "/work"


def scratch_dir() -> str:
    """A folder that ends with the pod: KFP_DDP_SCRATCH_DIR, else /scratch, else one below /tmp."""
    mounted = SCRATCH if os.path.isdir(SCRATCH) else ""
    return os.environ.get(SCRATCH_VARIABLE) or mounted or f"{tempfile.gettempdir()}/kfp-ddp"
