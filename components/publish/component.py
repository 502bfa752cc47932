"""The KFP component `publish`."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.1.0", install_kfp_package=False)
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
    """Publish a bundle: sealed with its verdict, signed, uploaded, and champion by compare-and-set.

    Args:
        bundle: Folder of the bundle, from export.
        published_model: Digest, formats, accuracy and place of the bundle, and whether it is the
            champion.
        publish_summary: Where it lies now, and what is in it.
        evaluation: Path of evaluation.json, from evaluate: the gate's verdict beside it, and the
            report, become part of the bundle; empty for none.
        model_name: Name of the model at the destination.
        destination: Where to upload to, as <destination>/<model_name>/<digest>/: gs://bucket/prefix,
            s3:// or az://, file:///folder or a folder; empty for nowhere but the run.
        champion: The gate's, if it has one. Where it is this model's, CHAMPION moves only if it
            still names what the gate compared with; else if it names what it did when the step
            began.
        champion_version: The gate's output.
        release: Settings of the release by name, those of signature and registry among them; the
            README lists them.
        attempt: Fingerprint of what was trained on and how, from changes: that this bundle came of
            it is noted by it at the destination; empty for no note.
        keep: Bundles at the destination that stay, of those with such a note: the newest, the
            champion, the one it was compared with and what a service answers with; 0 for all.
        run_id: Of the run.

    Returns:
        destination: URI of the uploaded bundle, or empty.
        version: What the bundle is called there.
    """
    inputs = dict(locals())
    from kfp_ddp.export.publish import run

    return run(**inputs)
