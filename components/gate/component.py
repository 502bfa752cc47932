"""The KFP component `gate`."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.1.0", install_kfp_package=False)
def gate(
    accuracy: float,
    gate_verdict: dsl.Output[dsl.Markdown],
    gate_report: dsl.Output[dsl.HTML],
    evaluation: str = "",
    bundle: str = "",
    rules: dict = {},  # noqa: B006
    champion: str = "",
    attempt: str = "",
) -> NamedTuple("Judged", [("Output", bool), ("champion_version", str)]):
    """Decide whether a model may be published. Not blessed is a result, not a failure.

    Args:
        accuracy: Accuracy of the model, from evaluate.
        gate_verdict: The rules and which of them hold; its metadata has blessed and reason.
        gate_report: The report of the evaluation with the verdict on top, as a page.
        evaluation: Path of evaluation.json, from evaluate; most rules need it.
        bundle: Folder of the bundle, from export, for rules on what serves; empty for none.
        rules: The rules by name, such as {"min_accuracy": 0.9}; the README lists them.
        champion: Model to beat: <destination>/<model_name> of an export for the last one there,
            a bundle, or an evaluation.json; as path, file://, gs://,
            s3:// or az://; empty for none. While
            nothing is there yet, every challenger passes, unless champion_must_exist is set.
            Better in a bucket: one on the work claim may go with the runs that keep_runs deletes.
        attempt: Fingerprint of what was trained on and how, from changes: that the model was not
            blessed is noted by it at the champion, a folder of exports; empty for no note.

    Returns:
        Output: Whether the model is blessed: all rules hold.
        champion_version: What the model was compared with, for publish; empty where there is none.
    """
    inputs = dict(locals())
    from kfp_ddp.evaluation.gate.engine import run

    return run(**inputs)
