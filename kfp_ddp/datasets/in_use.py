"""What a step uses is held for as long as it runs, so that nobody collects it meanwhile."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kfp_ddp.core.folders import is_per_node, is_remote
from kfp_ddp.core.lease import holding
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.datasets.versions import leases_of
from kfp_ddp.storage import leases


@contextlib.contextmanager
def using(holder: str, run_dir: Path | str, dataset: Path | str = "") -> Iterator[None]:
    """Hold the folder of a run's task, and the version of a dataset where it is a version.

    Args:
        holder: Id of the run, or name of the step where that is not known.
        run_dir: Folder of the task, or its address.
        dataset: Folder of the dataset; '' for none.
    """
    with contextlib.ExitStack() as held:
        if is_remote(str(run_dir)):
            held.enter_context(leases.holding(str(run_dir), holder))
        else:
            held.enter_context(holding(RunFolder(run_dir).leases, holder))
        version = leases_of(Path(dataset)) if dataset and not is_per_node(str(dataset)) else None
        if version is not None:
            held.enter_context(holding(version, holder))
        yield
