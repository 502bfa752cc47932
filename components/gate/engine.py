"""The gate step: accuracy and evaluation in, verdict out. A failed gate is not a failed step."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.gate.rules import Check, Rules, champion_checks, own_checks, verdict_of
from kfp_ddp.components.shared.champion import Champion, find
from kfp_ddp.components.shared.destination import open_destination
from kfp_ddp.components.shared.evaluation import AGAIN, FILE, Evaluation, hits_by_path
from kfp_ddp.components.shared.step import step

if TYPE_CHECKING:
    from kfp import dsl


@step
def run(
    accuracy: float,
    verdict: "dsl.Markdown",
    evaluation: str,
    rules: Mapping[str, Any],
    champion: str,
) -> bool:
    """Judge the model, write the verdict, and return whether it is blessed."""
    checks = judge(Rules.create(**rules), accuracy, evaluation, champion)
    blessed, reason = verdict_of(checks)
    Path(verdict.path).write_text(markdown(blessed, checks), encoding="utf-8")
    verdict.metadata.update({"blessed": blessed, "reason": reason})
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
    held = find(champion)
    if held is None:
        return [Check(True, f"there is no champion at {champion} yet")]
    record, where, note = held.evaluation, held.where, ""
    if not record.same_samples(challenger):
        again = _evaluated_again(folder / AGAIN, held, challenger)
        if again is None:
            return [Check(False, incomparable(held, challenger))]
        record, where = again, open_destination(str(folder / AGAIN))
        note = f" (champion {held.version()} re-evaluated on this split: {again.accuracy:.4f})"
    hits = None
    if rules.max_p_value < 1:
        ours = open_destination(str(folder)).read(challenger.predictions)
        theirs = where.read(record.predictions)
        if ours is None or theirs is None:
            missing = f"{folder if ours is None else where.uri}/{record.predictions}"
            raise InputError(
                f"max_p_value compares sample by sample, but there is no {missing}: "
                "keep the predictions beside the evaluation, or leave max_p_value at 1"
            )
        hits = (hits_by_path(ours.decode()), hits_by_path(theirs.decode()))
    return champion_checks(rules, challenger, record, hits, note)


def _evaluated_again(folder: Path, held: Champion, challenger: Evaluation) -> Evaluation | None:
    """What evaluate found of this very champion on the challenger's samples, if it did."""
    if not (folder / FILE).is_file():
        return None
    found = Evaluation.read(folder / FILE)
    same_model = found.checkpoint_digest == held.evaluation.checkpoint_digest
    return found if same_model and found.same_samples(challenger) else None


def incomparable(held: Champion, challenger: Evaluation) -> str:
    """Why a champion that was evaluated on other samples was not evaluated on these too."""
    said = "the champion was evaluated on other samples, so the two do not compare"
    if name := held.unknown_class(challenger):
        return (
            f"{said}, and it does not know the class {name!r} of this split: "
            "run once with champion empty to export this model as the next one to beat"
        )
    if not held.version():
        return (
            f"{said}, and only its evaluation is at {held.where.uri}: give its bundle, "
            "which evaluate can evaluate on this split"
        )
    return f"{said}: give evaluate the same champion, which it then evaluates on this split"


def markdown(blessed: bool, checks: list[Check]) -> str:
    """The verdict as a heading and a list of the rules, for the KFP UI."""
    from kfp_ddp.components.evaluate.report import cell

    lines = [f"## {'Blessed' if blessed else 'Not blessed'}", ""]
    lines += [f"- {'holds' if c.holds else '**fails**'}: {cell(c.words)}" for c in checks]
    return "\n".join(lines) + "\n"
