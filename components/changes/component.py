"""The KFP component `changes`."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.2.0", install_kfp_package=False)
def changes(
    digest: str,
    destination: str,
    change_summary: dsl.Output[dsl.Markdown],
    model_name: str = "resnet",
    training: dict = {},  # noqa: B006
    gate: dict = {},  # noqa: B006
    job: dict = {},  # noqa: B006
) -> NamedTuple("Changed", [("Output", bool), ("attempt", str)]):
    """Return whether data or settings differ from those of an earlier training.

    Nothing new is a result, not a failure: a pipeline on a schedule then trains nothing.

    Args:
        digest: Digest of the dataset's version, from data_sync.
        destination: Where bundles are uploaded to: gs://bucket/prefix, s3://, az:// or a folder.
        change_summary: What is new, or what came of the same before.
        model_name: Name of the exported model.
        training: Settings of the training by name, as train is given them.
        gate: Rules by name, as gate is given them.
        job: Settings of the job by name, as train is given them; its image counts.

    Returns:
        Whether there is something new, and the fingerprint of data and settings.
    """
    inputs = dict(locals())
    from kfp_ddp.models.attempts import run

    return run(**inputs)
