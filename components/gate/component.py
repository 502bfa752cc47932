"""The KFP component `gate`."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.2.0", install_kfp_package=False)
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
        gate_verdict: The result of each rule; its metadata has blessed and reason.
        gate_report: The report of the evaluation with the verdict, as a page.
        evaluation: Path of evaluation.json, from evaluate; most rules need it.
        bundle: Folder of the bundle, from export, for rules on the bundle; empty for none.
        rules: The rules by name, such as {"min_accuracy": 0.9}; the README lists them.
        champion: Model to compare with: exports, a bundle or an evaluation.json; empty for none.
        attempt: Fingerprint from changes, under which a refused model is noted; empty for no note.

    Returns:
        Whether all rules hold, and the version of the champion in the comparison, for publish.
    """
    inputs = dict(locals())
    from kfp_ddp.evaluation.gate.engine import run

    return run(**inputs)
