"""The KFP signature of `teardown`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.1.0", install_kfp_package=False)
def teardown(run_id: str, work_dir: str, backend: str = "pytorchjob", keep_runs: int = 0) -> str:
    """End whatever a run left behind; made for an exit handler, and content with nothing to do.

    Args:
        run_id: Id of the pipeline run.
        work_dir: Folder that holds the folder of the run, as given to train.
        backend: As given to train; local looks for processes alone, any other for jobs too.
        keep_runs: Delete the folders of runs before the newest so many, in which nothing was
            written for a day; 0 for none.

    Returns:
        One line that says what was ended.
    """
    from kfp_ddp.components.teardown.engine import run

    return run(run_id=run_id, work_dir=work_dir, backend=backend, keep_runs=keep_runs)
