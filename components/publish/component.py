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
        published_model: Digest, formats, accuracy and URI of the bundle, and whether it is the \
            champion.
        publish_summary: The same as a table.
        evaluation: Path of evaluation.json, from evaluate; the gate's verdict and the report \
            beside it become part of the bundle; empty for none.
        model_name: Name of the model at the destination.
        destination: Where to upload to, as <destination>/<model_name>/<digest>/: \
            gs://bucket/prefix, s3:// or az://, file:///folder or a folder; empty to leave it in \
            the run.
        champion: The champion of the gate, if it has one. If it is of this model, CHAMPION moves \
            only if it still names the version that the gate compared with; otherwise only if it \
            has not changed since the step started.
        champion_version: Output of the gate.
        release: Settings of the release by name; the README lists those of signature and registry.
        attempt: Fingerprint of data and settings, from changes, under which the bundle is \
            recorded at the destination; empty for no record.
        keep: Number of recorded bundles that remain at the destination. The champion, the version \
            that it replaced and versions in service remain, too; 0 for all.
        run_id: ID of the run.

    Returns:
        destination: URI of the uploaded bundle, or empty. \
        version: Version of the bundle.
    """
    inputs = dict(locals())
    from kfp_ddp.export.publish import run

    return run(**inputs)
