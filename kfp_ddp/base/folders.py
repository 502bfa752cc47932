"""Where the claims are mounted, unless somebody says otherwise."""

import os

DATA_VARIABLE = "KFP_DDP_DATA_DIR"
WORK_VARIABLE = "KFP_DDP_WORK_DIR"


def data_dir(given: str = "") -> str:
    """The folder of the data claim: what was given, else KFP_DDP_DATA_DIR, else /data."""
    return given or os.environ.get(DATA_VARIABLE) or "/data"


def work_dir(given: str = "") -> str:
    """The folder of the work claim: what was given, else KFP_DDP_WORK_DIR, else /work."""
    return given or os.environ.get(WORK_VARIABLE) or "/work"
