"""The gate step: accuracy and evaluation in, verdict out. A failed gate is no failed step."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from kfp_ddp.components.evaluate.record import FILE, Evaluation, hits_by_path
from kfp_ddp.components.export.bundle import CHAMPION
from kfp_ddp.components.gate.rules import Check, Rules, champion_checks, own_checks, verdict
from kfp_ddp.components.places import Place, place
from kfp_ddp.components.step import step
from kfp_ddp.training.errors import InputError

if TYPE_CHECKING:
    from kfp import dsl

_CHAMPION_FILES = (FILE, "metrics.json")  # beside a run, and in a bundle


@step
def run(
    *,
    accuracy: float,
    evaluation: str,
    champion: str,
    min_accuracy: float,
    use_lower_bound: bool,
    min_class_recall: float,
    max_calibration_error: float,
    min_improvement: float,
    max_p_value: float,
    verdict_artifact: "dsl.Markdown",
) -> bool:
    """Judge the model, write the verdict, and return whether it is blessed."""
    rules = Rules.create(
        min_accuracy=min_accuracy,
        use_lower_bound=use_lower_bound,
        min_class_recall=min_class_recall,
        max_calibration_error=max_calibration_error,
        min_improvement=min_improvement,
        max_p_value=max_p_value,
    )
    checks = judge(rules, accuracy, evaluation, champion)
    blessed, reason = verdict(checks)
    Path(verdict_artifact.path).write_text(markdown(blessed, checks), encoding="utf-8")
    verdict_artifact.metadata.update({"blessed": blessed, "reason": reason})
    print(reason)
    return blessed


def judge(rules: Rules, accuracy: float, evaluation: str, champion: str) -> list[Check]:
    """Apply the rules.

    Raises:
        InputError: for a rule that lacks what it compares with, or a file that cannot be used.
    """
    if not (math.isfinite(accuracy) and 0 <= accuracy <= 1):
        raise InputError(f"accuracy is {accuracy}: it is a share of the samples, 0 to 1")
    needed = rules.need_evaluation + (["champion"] if champion else [])
    if needed and not evaluation:
        raise InputError(
            f"{needed[0]} is set but evaluation is empty: connect the evaluation output of evaluate"
        )
    rules.check_champion(champion)
    found = Evaluation.read(Path(evaluation)) if evaluation else None
    if found is not None and abs(found.accuracy - accuracy) > 1e-6:
        raise InputError(
            f"accuracy is {accuracy} but {evaluation} says {found.accuracy}: connect both to the "
            "same evaluate step"
        )
    checks = own_checks(rules, accuracy, found)
    if champion and found is not None:
        checks += _against(rules, found, Path(evaluation).parent, champion)
    return checks


def _against(rules: Rules, challenger: Evaluation, folder: Path, champion: str) -> list[Check]:
    """The comparison with the champion at the URI `champion`."""
    where, names = champion_place(champion)
    for name in names:
        text = where.read(name)
        if text is not None:
            break
    else:
        return [Check(True, f"there is no champion at {champion} yet")]
    title = f"{where.uri}/{name}"
    record = Evaluation.parse(text.decode(errors="replace"), title)
    hits = None
    if rules.max_p_value < 1:
        ours = place(str(folder)).read(challenger.predictions)
        theirs = where.read(record.predictions)
        if ours is None or theirs is None:
            missing = f"{folder if ours is None else where.uri}/{record.predictions}"
            raise InputError(
                f"max_p_value compares sample by sample, but there is no {missing}: "
                "keep the predictions beside the evaluation, or leave max_p_value at 1"
            )
        hits = (hits_by_path(ours.decode()), hits_by_path(theirs.decode()))
    return champion_checks(rules, challenger, record, hits)


def champion_place(champion: str) -> tuple[Place, tuple[str, ...]]:
    """The folder a champion lies in, and the names that its evaluation may have there.

    The folder of a model's exports stands for the one that was exported last.
    """
    if champion.endswith(".json"):
        folder, slash, name = champion.rpartition("/")
        return place(folder if slash else "."), (name,)
    where = place(champion)
    version = where.read(CHAMPION)
    if version is not None:
        where = place(f"{where.uri}/{version.decode(errors='replace').strip()}")
    return where, _CHAMPION_FILES


def markdown(blessed: bool, checks: list[Check]) -> str:
    """The verdict as a heading and a list of the rules, for the KFP UI."""
    from kfp_ddp.components.evaluate.report import cell

    lines = [f"## {'Blessed' if blessed else 'Not blessed'}", ""]
    lines += [f"- {'holds' if c.holds else '**fails**'}: {cell(c.words)}" for c in checks]
    return "\n".join(lines) + "\n"
