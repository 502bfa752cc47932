"""The KFP component `teardown`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.1.0", install_kfp_package=False)
def teardown(
    run_id: str,
    backend: str = "pytorchjob",
    job: dict = {},  # noqa: B006
    work_dir: str = "",
    keep: int = 0,
) -> str:
    """End whatever a run left behind; made for an exit handler, and content with nothing to do.

    Args:
        run_id: Id of the pipeline run.
        backend: As given to train; local looks for processes alone, any other for jobs too.
        job: As given to train; its keep_runs is how many folders of runs stay, and who is told of
            the end stands in notify_webhook and the like.
        work_dir: Folder, or bucket's prefix, that holds the folder of the run, as given to train.
        keep: Folders of runs that stay, where job has no keep_runs; 0 for all.

    Returns:
        One line that says what was ended.
    """
    inputs = dict(locals())
    from kfp_ddp.runs.teardown.engine import run

    return run(**inputs)
