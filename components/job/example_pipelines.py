"""Pipelines that use `job`."""

from kfp import dsl


@dsl.pipeline
def example(image: str = "ghcr.io/you/trainer:1.0", nodes: int = 2) -> None:
    """Train on two nodes with eight GPUs each."""
    from kfp_ddp.components.job import job

    task = job(
        image=image,
        kind="pytorchjob",
        command=["python3", "train.py"],
        nodes=nodes,
        settings={"shm_size": "16Gi", "retries": 3},
    )
    # What is set on the task reaches the workers.
    task.set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(8)
    task.set_caching_options(False)  # else a later run takes the result of this one
