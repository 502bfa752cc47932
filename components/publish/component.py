"""The KFP component `publish`."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.2.0", install_kfp_package=False)
def publish(
    bundle: str,
    published_model: dsl.Output[dsl.Model],
    publish_summary: dsl.Output[dsl.Markdown],
    evaluation: str = "",
    model_name: str = "model",
    destination: str = "",
    champion: str = "",
    champion_version: str = "",
    release: dict = {},  # noqa: B006
    attempt: str = "",
    keep: int = 0,
    run_id: str = "",
) -> NamedTuple("Published", [("destination", str), ("version", str)]):
    """Publish a bundle: seal it with its verdict, sign and upload it, and make it the champion.

    Args:
        bundle: Folder of the bundle, from export.
        published_model: Digest, formats, accuracy and URI, and whether it is the champion.
        publish_summary: The same as a table.
        evaluation: Path of evaluation.json, from evaluate, for verdict and report; empty for none.
        model_name: Name of the model at the destination.
        destination: Where bundles go: gs://bucket/prefix, s3://, az:// or a folder; empty for none.
        champion: That of the gate, if it has one; CHAMPION moves only if it is unchanged.
        champion_version: Output of the gate.
        release: Settings of the release by name; the README lists those of signature and registry.
        attempt: Fingerprint, from changes, that the bundle is recorded under; empty for no record.
        keep: Number of recorded bundles that remain at the destination; 0 for all.
        run_id: ID of the run.

    Returns:
        URI of the uploaded bundle, or empty, and the version of the bundle.
    """
    inputs = dict(locals())
    from kfp_ddp.export.publish import run

    return run(**inputs)
