"""The KFP component `export`."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/trainer:0.1.0", install_kfp_package=False)
def export(
    checkpoint: str,
    run_dir: str,
    dataset_path: str,
    evaluation: str,
    exported_model: dsl.Output[dsl.Model],
    export_summary: dsl.Output[dsl.Markdown],
    model_name: str = "model",
    destination: str = "",
    split: str = "val",
    champion: str = "",
    champion_version: str = "",
    attempt: str = "",
    keep: int = 0,
    run_id: str = "",
) -> NamedTuple("Exported", [("bundle", str), ("destination", str)]):
    """Export a checkpoint as a bundle that other runtimes serve, proven against the checkpoint.

    Args:
        checkpoint: Folder of the checkpoint, as train returned it.
        run_dir: Folder of the run; the bundle is written to bundle/ below it.
        dataset_path: Folder of the dataset version; its images prove that the formats agree.
        evaluation: Path of evaluation.json, from evaluate.
        exported_model: Digest, formats, accuracy and place of the bundle, and whether it is the
            champion.
        export_summary: Sizes, parity and latency.
        model_name: Name of the model in the bundle, its serving layout and the destination.
        destination: Where to upload to, as <destination>/<model_name>/<digest>/: gs://bucket/prefix,
            s3:// or az://, file:///folder or a folder; empty for nowhere but the run.
        split: Folder of the dataset that the samples are from.
        champion: The gate's, if it has one. Where it is this model's, CHAMPION moves only if it
            still names what the gate compared with; else if it names what it did when the step
            began.
        champion_version: The gate's output.
        attempt: Fingerprint of what was trained on and how, from changes: that this bundle came of
            it is noted by it at the destination; empty for no note.
        keep: Bundles at the destination that stay, of those with such a note: the newest, the
            champion and the one it was compared with; 0 for all.
        run_id: Of the run, which the bundle remembers.

    Returns:
        bundle: Folder of the bundle.
        destination: URI of the uploaded bundle, or empty.
    """
    inputs = dict(locals())
    from kfp_ddp.components.export.engine import run

    return run(**inputs)
