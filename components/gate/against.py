"""The model against the champion, on the very same samples. Plain Python."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.gate.checks import Check, at_least, at_most
from kfp_ddp.components.gate.rules import Rules
from kfp_ddp.components.shared.champion import Champion
from kfp_ddp.components.shared.comparison import discordant, mcnemar
from kfp_ddp.components.shared.evaluation import AGAIN, FILE, Evaluation
from kfp_ddp.components.shared.step import secret

Hits = dict[str, bool]
_NAMED = 3  # classes in a line


class Against(NamedTuple):
    """What came of the comparison, and the champion's accuracy on these samples, if known."""

    checks: list[Check]
    accuracy: float | None = None


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
    from kfp_ddp.components.shared import signature

    if not key:
        return []
    pem = secret(key)
    if not pem:
        raise InputError(
            f"the bucket's secret (bucket_secret) holds no key {key}, which champion_key names: "
            f"add it, as by kubectl create secret generic … --from-file={key}=…"
        )
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
    again = None
    if not held.evaluation.same_samples(challenger):
        again = _evaluated_again(folder / AGAIN, held, challenger)
        if again is None:
            said = incomparable(held, challenger)
            return Against([Check("champion", False, said)])
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
    checks = champion_checks(rules, challenger, theirs, hits, note)
    return Against(checks + class_checks(held.evaluation, challenger), theirs.accuracy)


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
    near = difflib.get_close_matches(name.casefold(), lower, n=1)
    return f" (was {lower[near[0]]!r} renamed? then name it as before)" if near else ""


def champion_checks(
    rules: Rules,
    challenger: Evaluation,
    champion: Evaluation,
    hits: tuple[Hits, Hits] | None,
    note: str = "",
) -> list[Check]:
    """The rules that compare with the champion, on the very same samples.

    `hits` tells for challenger and champion whether each sample was told right, None if no rule
    asks for it; `note` is what to say of the champion's evaluation.
    """
    gain = (challenger.correct - champion.correct) / challenger.samples
    what = "improvement on the champion"
    gained = at_least("min_improvement", what, gain, rules.min_improvement)
    checks = [Check(gained.rule, gained.holds, gained.words + note, gained.value, gained.bound)]
    if hits is not None:
        won, lost = discordant(*hits)
        what = f"McNemar p-value ({won} samples won, {lost} lost)"
        checks.append(at_most("max_p_value", what, mcnemar(won, lost), rules.max_p_value))
    return checks
