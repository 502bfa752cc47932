"""The KFP component `export`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/trainer:0.2.0", install_kfp_package=False)
def export(
    checkpoint: str,
    run_dir: str,
    dataset_path: str,
    evaluation: str,
    exported_model: dsl.Output[dsl.Model],
    export_summary: dsl.Output[dsl.Markdown],
    model_name: str = "model",
    split: str = "val",
    release: dict = {},  # noqa: B006
) -> str:
    """Export a checkpoint as a bundle for other runtimes, compared with the checkpoint.

    Args:
        checkpoint: Folder of the checkpoint, as train returned it; empty if evaluate wrote it.
        run_dir: Folder of the run, in which bundle/ is made; empty for that of the evaluation.
        dataset_path: Folder of the dataset version; the formats are compared on its images.
        evaluation: Path of evaluation.json, from evaluate.
        exported_model: Digest, formats, accuracy and URI of the bundle.
        export_summary: Sizes, parity and latency.
        model_name: Name of the model in the bundle and its serving layout.
        split: Folder of the dataset that the samples are from.
        release: Settings of the release by name; the README lists those of the bundle.

    Returns:
        Folder of the bundle.
    """
    inputs = dict(locals())
    from kfp_ddp.export.engine import run

    return run(**inputs)
