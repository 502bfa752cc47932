"""The KFP component `teardown`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.2.0", install_kfp_package=False)
def teardown(
    run_id: str,
    backend: str = "pytorchjob",
    job: dict = {},  # noqa: B006
    work_dir: str = "",
    keep: int = 0,
) -> str:
    """Clean up after a run and notify of its end, in an exit handler.

    Args:
        run_id: Id of the pipeline run.
        backend: As for train; with local only processes are ended, otherwise jobs too.
        job: As for train, with keep_runs and the settings of notifications.
        work_dir: Folder, or prefix of a bucket, that contains the folder of the run, as for train.
        keep: Number of folders of runs to retain, if job has no keep_runs; 0 for all.

    Returns:
        One line with the processes, jobs and folders that were ended or deleted.
    """
    inputs = dict(locals())
    from kfp_ddp.runs.teardown.engine import run

    return run(**inputs)
