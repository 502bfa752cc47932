"""The KFP component `leaderboard`."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.2.0", install_kfp_package=False)
def leaderboard(
    run_dirs: list,
    checkpoints: list,
    failures: list,
    sweep_report: dsl.Output[dsl.HTML],
    sweep_metrics: dsl.Output[dsl.Metrics],
    sweep_summary: dsl.Output[dsl.Markdown],
) -> NamedTuple("Best", [("checkpoint", str), ("run_dir", str)]):
    """Rank trainings by the accuracy of their checkpoints.

    Args:
        run_dirs: Folder of each training, as train returned it.
        checkpoints: Its checkpoint; empty if it failed.
        failures: Why it failed; empty if it did not.
        sweep_report: The trainings with the settings in which they differ, and their curves.
        sweep_metrics: Accuracy of the best, and the number of trials, failed and ended early.
        sweep_summary: The trainings in a table.

    Returns:
        The checkpoint of the best training, and its folder.
    """
    inputs = dict(locals())
    from kfp_ddp.evaluation.leaderboard import run

    return run(**inputs)
