"""The gate step: accuracy and evaluation in, verdict out. A failed gate is not a failed step."""

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kfp_ddp.base.errors import InputError
from kfp_ddp.base.files import atomic_write
from kfp_ddp.base.run_folder import VERDICT
from kfp_ddp.components.gate.rules import Check, Rules, champion_checks, own_checks, verdict_of
from kfp_ddp.components.shared import attempts
from kfp_ddp.components.shared.champion import Champion, find
from kfp_ddp.components.shared.destination import open_destination
from kfp_ddp.components.shared.evaluation import AGAIN, FILE, Evaluation
from kfp_ddp.components.shared.step import step
from kfp_ddp.components.shared.workspace import opened

if TYPE_CHECKING:
    from kfp import dsl


class Judged(NamedTuple):
    """Whether the model is blessed, and the version of the champion that it was compared with."""

    Output: bool
    champion_version: str


@step
def run(
    accuracy: float,
    gate_verdict: "dsl.Markdown",
    evaluation: str,
    bundle: str,
    rules: Mapping[str, Any],
    champion: str,
    attempt: str,
) -> Judged:
    """Judge the model and write the verdict."""
    checked = Rules.create(**rules)
    with opened(evaluation.rpartition("/")[0], "gate") as folder:
        here = str(folder.file(evaluation)) if evaluation else ""
        judged = judge(checked, accuracy, here, champion)
        version = judged.champion
        blessed, reason = verdict_of(judged.checks)
        if here:
            _record(Path(here), judged, blessed, reason)
    Path(gate_verdict.path).write_text(markdown(blessed, judged.checks), encoding="utf-8")
    gate_verdict.metadata.update({"blessed": blessed, "reason": reason, "champion": version})
    print(reason)
    if attempt and not blessed:
        where = open_destination(champion)
        attempts.note(where, attempt, version="", champion=version, reason=reason)
    return Judged(blessed, version)


class Judgement(NamedTuple):
    """What came of each rule, and the champion: its version, and its accuracy on these samples."""

    checks: list[Check]
    champion: str = ""
    champion_accuracy: float | None = None


def _record(evaluation: Path, judged: Judgement, blessed: bool, reason: str) -> None:
    """Leave the verdict beside the evaluation, for who tells of the run; a folder may refuse it."""
    found = Evaluation.read(evaluation)
    said = {
        "blessed": blessed,
        "reason": reason,
        "model": found.model,
        "accuracy": found.accuracy,
        "dataset_digest": found.dataset_digest,
        "champion": judged.champion,
        "champion_accuracy": judged.champion_accuracy,
    }
    with contextlib.suppress(OSError), atomic_write(evaluation.with_name(VERDICT)) as file:
        file.write(json.dumps(said, indent=1).encode())


def judge(rules: Rules, accuracy: float, evaluation: str, champion: str) -> Judgement:
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
    if not champion or found is None:
        return Judgement(checks)
    held = find(champion)
    if held is None:
        must = rules.champion_must_exist
        checks.append(Check(not must, f"there is no champion at {champion} yet"))
        return Judgement(checks)
    compared, theirs = _against(rules, found, Path(evaluation).parent, held)
    return Judgement(checks + compared, held.version, theirs)


def _against(
    rules: Rules, challenger: Evaluation, folder: Path, held: Champion
) -> tuple[list[Check], float | None]:
    """The comparison with the champion, and its accuracy where the two compare."""
    again = None
    if not held.evaluation.same_samples(challenger):
        again = _evaluated_again(folder / AGAIN, held, challenger)
        if again is None:
            return [Check(False, incomparable(held, challenger))], None
    hits = None
    if rules.max_p_value < 1:
        its = again.read_hits(folder / AGAIN) if again is not None else held.predictions()
        hits = (challenger.read_hits(folder), its)
    note = ""
    if again is not None:
        note = f" (champion {held.version} re-evaluated on this split: {again.accuracy:.4f})"
    elif not challenger.of_known_content:
        note = " (their samples have the same names; neither side knows a digest of them)"
    theirs = again or held.evaluation
    return champion_checks(rules, challenger, theirs, hits, note), theirs.accuracy


def _evaluated_again(folder: Path, held: Champion, challenger: Evaluation) -> Evaluation | None:
    """What evaluate found of this very champion on the challenger's samples, if it did."""
    if not (folder / FILE).is_file():
        return None
    found = Evaluation.read(folder / FILE)
    same_model = found.checkpoint_digest == held.evaluation.checkpoint_digest
    return found if same_model and found.same_samples(challenger) else None


def incomparable(held: Champion, challenger: Evaluation) -> str:
    """Why a champion that was evaluated on other samples was not evaluated on these too."""
    said = f"the champion was {held.evaluation.differs(challenger)}, so the two do not compare"
    if name := held.unknown_class(challenger):
        return (
            f"{said}, and it does not know the class {name!r} of this split: "
            "run once with champion empty to export this model as the next one to beat"
        )
    if not held.version:
        return (
            f"{said}, and only its evaluation is at {held.uri}: give its bundle, "
            "which evaluate can evaluate on this split"
        )
    return f"{said}: give evaluate the same champion, which it then evaluates on this split"


def markdown(blessed: bool, checks: list[Check]) -> str:
    """The verdict as a heading and a list of the rules, for the KFP UI."""
    from kfp_ddp.components.shared.markdown import cell

    lines = [f"## {'Blessed' if blessed else 'Not blessed'}", ""]
    lines += [f"- {'holds' if c.holds else '**fails**'}: {cell(c.words)}" for c in checks]
    return "\n".join(lines) + "\n"
