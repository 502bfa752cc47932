"""The KFP component `netcheck`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.2.0", install_kfp_package=False)
def netcheck(
    run_id: str,
    task_name: str,
    task_id: str,
    network_summary: dsl.Output[dsl.Markdown],
    network_metrics: dsl.Output[dsl.Metrics],
    backend: str = "pytorchjob",
    nodes: int = 2,
    gpus_per_node: int = 0,
    job: dict = {},  # noqa: B006
    check: dict = {},  # noqa: B006
    image: str = "ghcr.io/kfp-ddp/trainer:0.2.0",
) -> bool:
    """Measure the network between the pods of a job: all-reduce, latency, each pair of nodes.

    Args:
        run_id: Id of the pipeline run.
        task_name: Name of this task in the pipeline.
        task_id: The pipeline's task id, which tells iterations of a loop apart; empty outside of a
            pipeline.
        network_summary: What was found, the worst first, with all figures.
        network_metrics: Latency, bus bandwidth, the slowest link and the number of problems.
        backend: pytorchjob (Training Operator), trainjob (Trainer), or local: processes of this
            step.
        nodes: Number of pods.
        gpus_per_node: GPUs of each pod, whose ranks go by NCCL; 0 for one rank a pod that goes by
            Gloo.
        job: Settings of the job by name, as of train; the README of the component job lists them.
        check: What is measured, and against what, by name; the README lists it.
        image: Image of the pods, where job names none.

    Returns:
        Whether nothing is wrong. A slow network is a result, not a failure of the step.
    """
    inputs = dict(locals())
    from kfp_ddp.jobs.netcheck import run

    return run(**inputs)
