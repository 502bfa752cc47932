"""Comparison of a model with the champion, on the same samples."""

import difflib
from dataclasses import replace
from pathlib import Path

from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation.comparison import compare
from kfp_ddp.evaluation.gate.rules import Check, Rules, check_maximum, check_minimum
from kfp_ddp.evaluation.results import samples_digest
from kfp_ddp.models.champion import Champion
from kfp_ddp.models.evaluation import CHAMPION_FOLDER, FILE, Compared, Evaluation, Prediction

Predictions = dict[str, Prediction]
_MAX_NAMED = 3
"""Classes in a line."""


def compare_with_champion(
    rules: Rules, challenger: Evaluation, folder: Path, champion: Champion
) -> tuple[list[Check], Compared | None]:
    """Return checks of the gain over the champion, and the comparison; None if not comparable.

    The champion's evaluation of the same samples counts, else that below `folder`. Raise InputError
    for missing or damaged predictions.
    """
    own = challenger
    other = champion.evaluation
    note = ""
    own_predictions = None
    if rules.max_p_value < 1 or (folder / challenger.predictions).is_file():
        own_predictions = challenger.read_predictions(folder)
    if champion.evaluation.same_samples(challenger):
        other_predictions = _predictions_of(champion, needed=rules.max_p_value < 1)
        if not (challenger.split_digest or challenger.dataset_digest):
            note = " (the samples have the same names; neither side has a digest of their content)"
    else:
        again = _again(folder / CHAMPION_FOLDER / FILE, champion)
        refused = Check("champion", False, _incomparable(champion, challenger))
        if again is None:
            return [refused], None
        scope = "on this split"
        if not again.same_samples(challenger):
            part = _known_classes(challenger, own_predictions, champion, again)
            if part is None:
                return [refused], None
            own, own_predictions = part
            scope = f"on the {own.samples} samples of its classes"
        other = again
        other_predictions = again.read_predictions(folder / CHAMPION_FOLDER)
        note = f" (champion {champion.version} re-evaluated {scope}: {again.accuracy:.4f})"
    both = None
    if own_predictions is not None and other_predictions is not None:
        both = own_predictions, other_predictions
    compared = compare(own, other, both, where=champion.uri, version=champion.version)
    checks = _gain_checks(rules, compared, note)
    return checks + _class_checks(champion.evaluation, challenger), compared


def _predictions_of(champion: Champion, *, needed: bool) -> Predictions | None:
    """Return the champion's own predictions; raise InputError if they are needed and missing."""
    predictions = champion.predictions()
    if predictions is None and needed:
        raise InputError(
            f"max_p_value compares sample by sample, but {champion.uri}/"
            f"{champion.evaluation.predictions} is not found: keep the predictions beside the "
            "evaluation, or leave max_p_value at 1"
        )
    return predictions


def _gain_checks(rules: Rules, compared: Compared, note: str) -> list[Check]:
    """Return the checks of the gain, with a note on how it was measured."""
    gain = check_minimum(
        "min_improvement", "improvement on the champion", compared.gain, rules.min_improvement
    )
    if gain.holds and compared.gain == 0:
        note = f" (equal to the champion: as good as it must be){note}"
    checks = [replace(gain, words=gain.words + note)]
    if rules.max_p_value < 1 and compared.p_value is not None:
        name = f"McNemar p-value ({compared.won} samples won, {compared.lost} lost)"
        checks.append(check_maximum("max_p_value", name, compared.p_value, rules.max_p_value))
    return checks


def _again(file: Path, champion: Champion) -> Evaluation | None:
    """Return what evaluate measured of the bundle that is the champion here; None for none."""
    if not file.is_file():
        return None
    record = Evaluation.read(file)
    return record if record.bundle_digest == champion.bundle.digest else None


def _class_checks(champion: Evaluation, challenger: Evaluation) -> list[Check]:
    """Return a note if the classes differ from those of the champion."""
    old = [own.name for own in champion.classes]
    new = [own.name for own in challenger.classes]
    if old == new:
        return []
    if sorted(old) == sorted(new):
        return [Check("classes", True, "the champion has the same classes in another order")]
    added = [name for name in new if name not in set(old)]
    removed = [name for name in old if name not in set(new)]
    changes = []
    if added:
        changes.append(f"added {_first_names(added)}")
    if removed:
        changes.append(f"removed {_first_names(removed)}")
    return [Check("classes", True, f"classes differ from the champion's: {', '.join(changes)}")]


def _first_names(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return " ".join(map(repr, names[:_MAX_NAMED])) + more


def _incomparable(champion: Champion, challenger: Evaluation) -> str:
    """Return why a champion was not evaluated on the samples of the challenger."""
    reason = (
        f"the champion was {champion.evaluation.differs(challenger)}, so the two are not comparable"
    )
    known = _class_names(champion.evaluation)
    seen = [own.name for own in challenger.classes if own.samples]
    unknown = [name for name in seen if name not in known]
    if unknown:
        name = unknown[0]
        removed = known - _class_names(challenger)
        lower = {other.casefold(): other for other in sorted(removed)}
        similar = difflib.get_close_matches(name.casefold(), lower)
        renamed = f" (was {lower[similar[0]]!r} renamed? then use the old name)" if similar else ""
        return (
            f"{reason}, and it does not have the class {name!r} of this split{renamed}: run once "
            "with champion empty to export this model as the next champion"
        )
    if not champion.version:
        return (
            f"{reason}, and {champion.uri} has only its evaluation: give its bundle, "
            "which evaluate can evaluate on this split"
        )
    return f"{reason}: give evaluate the same champion, which it then evaluates on this split"


def _known_classes(
    challenger: Evaluation, predictions: Predictions | None, champion: Champion, again: Evaluation
) -> tuple[Evaluation, Predictions] | None:
    """Return the challenger on the samples of the champion's classes, if `again` is of these."""
    known = _class_names(champion.evaluation)
    predicted = predictions or {}
    part = {path: own for path, own in predicted.items() if own.target in known}
    digest = samples_digest((path, own.target) for path, own in part.items())
    samples = (len(part), digest, challenger.dataset_digest)
    if samples != (again.samples, again.samples_digest, again.dataset_digest):
        return None
    correct = sum(own.correct for own in part.values())
    return challenger.model_copy(update={"samples": len(part), "correct": correct}), part


def _class_names(evaluation: Evaluation) -> set[str]:
    return {one.name for one in evaluation.classes}
