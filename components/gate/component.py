"""The KFP component `gate`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.1.0", install_kfp_package=False)
def gate(
    accuracy: float,
    verdict: dsl.Output[dsl.Markdown],
    min_accuracy: float = 0.0,
    evaluation: str = "",
    use_lower_bound: bool = False,
    min_class_recall: float = 0.0,
    max_calibration_error: float = 1.0,
    champion: str = "",
    min_improvement: float = 0.0,
    max_p_value: float = 1.0,
) -> bool:
    """Decide whether a model may be exported. Not blessed is a result, not a failure.

    Args:
        accuracy: Accuracy of the model, from evaluate.
        verdict: The rules and which of them hold; its metadata has blessed and reason.
        min_accuracy: Accuracy a model must have, 0 to 1.
        evaluation: Path of evaluation.json, from evaluate; the rules below need it.
        use_lower_bound: Hold min_accuracy against the lower end of the 95 % interval instead.
        min_class_recall: Recall that every class must have, 0 to 1.
        max_calibration_error: Expected calibration error a model may have, 0 to 1.
        champion: Model to beat: <destination>/<model_name> of an export for the last one there,
            a bundle, or an evaluation.json; as path, file:// or gs://; empty for none. While
            nothing is there yet, every challenger passes. Better in a bucket: one on the work
            claim may go with the runs that keep_runs deletes.
        min_improvement: Accuracy that the challenger must gain on the champion, -1 to 1. At 0 a
            tie passes; 0.001 asks for a tenth of a percent more.
        max_p_value: Chance that the gain is luck, by McNemar's exact test on the same samples;
            1 to not ask.

    Returns:
        Whether the model is blessed: all rules hold.
    """
    from kfp_ddp.components.gate.engine import run

    return run(
        accuracy=accuracy,
        evaluation=evaluation,
        champion=champion,
        min_accuracy=min_accuracy,
        use_lower_bound=use_lower_bound,
        min_class_recall=min_class_recall,
        max_calibration_error=max_calibration_error,
        min_improvement=min_improvement,
        max_p_value=max_p_value,
        verdict_artifact=verdict,
    )
