"""The model against the champion, on the very same samples. Plain Python."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.step import needed_secret
from kfp_ddp.evaluation.comparison import compare
from kfp_ddp.evaluation.gate.checks import Check, at_least, at_most
from kfp_ddp.evaluation.gate.rules import Rules
from kfp_ddp.evaluation.samples import samples_digest
from kfp_ddp.models.champion import Champion
from kfp_ddp.models.evaluation import AGAIN, FILE, Compared, Evaluation, Told

Predictions = dict[str, Told]
_NAMED = 3  # classes in a line


class Against(NamedTuple):
    """What came of the comparison, and its figures where the two compare."""

    checks: list[Check]
    compared: Compared | None = None


def signed(key: str, held: Champion) -> list[Check]:
    """Refuse a champion that a key does not vouch for.

    Args:
        key: Of the bucket's secret, for a public key; '' to not ask.
        held: The champion.

    Returns:
        What to say of it.

    Raises:
        InputError: the secret lacks the key, it is none, or the champion is not signed by it.
    """
    from kfp_ddp.models import signature

    if not key:
        return []
    pem = needed_secret(key, "champion_key")
    signer = signature.by_key(signature.public_key(pem.encode(), f"champion_key ({key})"))
    signature.check(held.sealed, signer)
    return [Check("champion_key", True, f"the champion is signed by {signer.name}")]


def against(rules: Rules, challenger: Evaluation, folder: Path, held: Champion) -> Against:
    """Compare with a champion.

    Args:
        rules: What is asked of the comparison.
        challenger: The model's evaluation.
        folder: Where that lies, and what evaluate found of the champion on the same samples.
        held: The champion.

    Raises:
        InputError: predictions that are missing, damaged or not those of their evaluation.
    """
    mine, theirs, note = challenger, held.evaluation, ""
    told = _told(challenger, folder, rules.max_p_value < 1)
    if held.evaluation.same_samples(challenger):
        its = held.told()
        if its is None and rules.max_p_value < 1:
            raise InputError(
                f"max_p_value compares sample by sample, but there is no {held.uri}/"
                f"{held.evaluation.predictions}: keep the predictions beside the evaluation, or "
                "leave max_p_value at 1"
            )
        if not challenger.of_known_content:
            note = " (their samples have the same names; neither side knows a digest of them)"
    else:
        again = _evaluated_again(folder / AGAIN, held)
        if again is not None and again.same_samples(challenger):
            where = "on this split"
        elif again is not None and (part := _of_known_classes(challenger, told, held, again)):
            mine, told = part
            where = f"on the {mine.samples} samples of classes that it knows"
        else:
            return Against([Check("champion", False, incomparable(held, challenger))])
        theirs, its = again, again.read_told(folder / AGAIN)
        note = f" (champion {held.version} re-evaluated {where}: {again.accuracy:.4f})"
    both = None if told is None or its is None else (told, its)
    compared = compare(mine, theirs, both, where=held.uri, version=held.version)
    checks = champion_checks(rules, compared, note)
    return Against(checks + class_checks(held.evaluation, challenger), compared)


def _told(challenger: Evaluation, folder: Path, needed: bool) -> Predictions | None:
    """What the model's evaluation found of each sample; None where nobody needs it."""
    if not needed and not (folder / challenger.predictions).is_file():
        return None
    return challenger.read_told(folder)


def _evaluated_again(folder: Path, held: Champion) -> Evaluation | None:
    """What evaluate found of this very champion on the samples of today, if it did."""
    if not (folder / FILE).is_file():
        return None
    found = Evaluation.read(folder / FILE)
    same_model = found.checkpoint_digest == held.evaluation.checkpoint_digest
    return found if same_model else None


def _of_known_classes(
    challenger: Evaluation, told: Predictions | None, held: Champion, again: Evaluation
) -> tuple[Evaluation, Predictions] | None:
    """The model on the samples of the classes that the champion was taught, too.

    None if these are not what the champion was evaluated on again.
    """
    known = classes_of(held.evaluation)
    part = {path: one for path, one in (told or {}).items() if one.target in known}
    digest = samples_digest((path, one.target) for path, one in part.items())
    mine = (len(part), digest, challenger.dataset_digest)
    if mine != (again.samples, again.samples_digest, again.dataset_digest):
        return None
    correct = sum(one.right for one in part.values())
    return challenger.model_copy(update={"samples": len(part), "correct": correct}), part


def incomparable(held: Champion, challenger: Evaluation) -> str:
    """Why a champion that was evaluated on other samples was not evaluated on these too."""
    said = f"the champion was {held.evaluation.differs(challenger)}, so the two do not compare"
    if name := held.unknown_class(challenger):
        gone = classes_of(held.evaluation).difference(classes_of(challenger))
        return (
            f"{said}, and it does not know the class {name!r} of this split{_renamed(name, gone)}: "
            "run once with champion empty to export this model as the next one to beat"
        )
    if not held.version:
        return (
            f"{said}, and only its evaluation is at {held.uri}: give its bundle, "
            "which evaluate can evaluate on this split"
        )
    return f"{said}: give evaluate the same champion, which it then evaluates on this split"


def class_checks(champion: Evaluation, challenger: Evaluation) -> list[Check]:
    """What to know of classes that are not those of the champion, for who uses their numbers."""
    known, mine = ([one.name for one in each.classes] for each in (champion, challenger))
    if known == mine:
        return []
    if sorted(known) == sorted(mine):
        return [Check("classes", True, "the champion has the same classes in another order")]
    new = [name for name in mine if name not in set(known)]
    gone = [name for name in known if name not in set(mine)]
    said = [f"{what} {_some(names)}" for what, names in (("new", new), ("gone", gone)) if names]
    return [Check("classes", True, f"classes are not the champion's: {', '.join(said)}")]


def classes_of(evaluation: Evaluation) -> set[str]:
    """The names of all its classes."""
    return {one.name for one in evaluation.classes}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if names[_NAMED:] else ""
    return " ".join(map(repr, names[:_NAMED])) + more


def _renamed(name: str, gone: set[str]) -> str:
    """The class that a new one may have been, to follow it in a line; '' where none is near."""
    lower = {each.casefold(): each for each in sorted(gone)}
    near = difflib.get_close_matches(name.casefold(), lower)
    return f" (was {lower[near[0]]!r} renamed? then name it as before)" if near else ""


def champion_checks(rules: Rules, compared: Compared, note: str = "") -> list[Check]:
    """The rules that compare with the champion, on the very same samples.

    Args:
        rules: What is asked of the comparison.
        compared: Its figures.
        note: What to say of the champion's evaluation.
    """
    what = "improvement on the champion"
    gained = at_least("min_improvement", what, compared.gain, rules.min_improvement)
    checks = [Check(gained.rule, gained.holds, gained.words + note, gained.value, gained.bound)]
    if rules.max_p_value < 1 and compared.p_value is not None:
        what = f"McNemar p-value ({compared.won} samples won, {compared.lost} lost)"
        checks.append(at_most("max_p_value", what, compared.p_value, rules.max_p_value))
    return checks
