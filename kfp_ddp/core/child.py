"""The environment of another Python that works for a run on this machine alone."""

import os
import re
from collections.abc import Mapping

_OF_LAUNCHERS = re.compile(
    r"(PET|TORCHELASTIC|SLURM|OMPI|PMI|PMIX|PRTE|MPI|MV2|HYDRA|FLUX|PALS|JSM|HOROVOD|ACCELERATE)_.*"
    r"|(\w+_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(NCCL|GLOO|TP)_SOCKET_IFNAME|NCCL_COMM_ID"
    r"|ROLE_NAME|PYTHON_EXEC|KFP_DDP_(ELASTIC|RESTARTS|LAUNCH_ID|PARENT_PID)"
)
"""What torchrun, MPI, batch systems and we set for a rank, and torch would take for its own."""


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a child that is no rank and imports nothing from the current folder."""
    own = {name: value for name, value in os.environ.items() if not _OF_LAUNCHERS.fullmatch(name)}
    # An empty entry, as of PYTHONPATH=$PYTHONPATH:/x, is the current folder.
    if path := os.pathsep.join(filter(None, own.pop("PYTHONPATH", "").split(os.pathsep))):
        own["PYTHONPATH"] = path
    return {**own, "PYTHONSAFEPATH": "1", **more}
