"""The rules a model must meet, and the verdict over them in words. Plain Python."""

from dataclasses import dataclass

from pydantic import Field

from kfp_ddp.base.errors import InputError
from kfp_ddp.base.settings import Settings
from kfp_ddp.components.shared.evaluation import Evaluation


class Rules(Settings):
    """Thresholds; each default is met by every model, so a rule that is not set asks nothing."""

    min_accuracy: float = Field(0.0, ge=0, le=1)
    """Accuracy that the model must have, as a share: 0.97 for 97 %."""
    use_lower_bound: bool = False
    """Hold min_accuracy against the lower end of the accuracy's 95 % interval."""
    min_class_recall: float = Field(0.0, ge=0, le=1)
    """Recall that every class must have, as a share: 0.97 for 97 %; without samples it has
    none."""
    max_calibration_error: float = Field(1.0, ge=0, le=1)
    """Expected calibration error to have at most, as a share: 0.97 for 97 %."""
    min_improvement: float = Field(0.0, ge=-1, le=1)
    """Accuracy to gain on the champion, a share: 0.001 asks for a tenth of a percent more; at 0 a
    tie passes."""
    max_p_value: float = Field(1.0, gt=0, le=1)
    """Chance that the gain is luck, by McNemar's exact test on the same samples; 1 to not ask."""
    champion_must_exist: bool = False
    """Fail where no model lies at champion yet, as after a misspelt name; false for a first run."""

    @property
    def need_evaluation(self) -> list[str]:
        """The rules set that ask for more than the accuracy alone."""
        asked = {
            "use_lower_bound": self.use_lower_bound,
            "min_class_recall": self.min_class_recall > 0,
            "max_calibration_error": self.max_calibration_error < 1,
        }
        return [name for name, is_set in asked.items() if is_set]

    @property
    def need_champion(self) -> list[str]:
        """The rules set that compare with a champion."""
        asked = {
            "min_improvement": self.min_improvement != 0,
            "max_p_value": self.max_p_value < 1,
            "champion_must_exist": self.champion_must_exist,
        }
        return [name for name, is_set in asked.items() if is_set]

    def check_champion(self, champion: str) -> None:
        """Refuse rules that compare with a champion where none is named.

        Raises:
            InputError: naming the rule.
        """
        if self.need_champion and not champion:
            raise InputError(
                f"{self.need_champion[0]} is set but champion is empty: give the champion's "
                "evaluation.json, its folder or its bundle"
            )


@dataclass(frozen=True)
class Check:
    """One rule as applied: does it hold, and the comparison in words."""

    holds: bool
    words: str


def at_least(what: str, value: float, bound: float) -> Check:
    """Check `value >= bound`."""
    holds = value >= bound
    return Check(holds, f"{what} {_shown(value, bound)} {'>=' if holds else '<'} {bound:g}")


def at_most(what: str, value: float, bound: float) -> Check:
    """Check `value <= bound`."""
    holds = value <= bound
    return Check(holds, f"{what} {_shown(value, bound)} {'<=' if holds else '>'} {bound:g}")


def _shown(value: float, bound: float) -> str:
    """Four decimals, or as many as it takes to tell `value` from 0 and from `bound`."""
    short = f"{value:.4f}"
    tells = float(short) not in (0.0, bound) or value in (0.0, bound)
    return short if tells else f"{value:.9g}"


def own_checks(rules: Rules, accuracy: float, evaluation: Evaluation | None) -> list[Check]:
    """The rules that look at the model alone."""
    if evaluation is not None and rules.use_lower_bound:
        what = "lower end of the 95 % interval of the accuracy"
        checks = [at_least(what, evaluation.accuracy_low, rules.min_accuracy)]
    else:
        checks = [at_least("accuracy", accuracy, rules.min_accuracy)]
    if evaluation is not None and rules.min_class_recall > 0:
        checks.append(_class_recall(rules.min_class_recall, evaluation))
    if evaluation is not None and rules.max_calibration_error < 1:
        error = evaluation.calibration_error
        checks.append(at_most("calibration error", error, rules.max_calibration_error))
    return checks


def _class_recall(bound: float, evaluation: Evaluation) -> Check:
    absent = [one.name for one in evaluation.classes if not one.samples]
    if absent:
        more = f" and {len(absent) - 1} more" if absent[1:] else ""
        said = f"class {absent[0]}{more} has no samples in {evaluation.split}, so no recall"
        return Check(False, f"{said} >= {bound:g}")
    worst = min(evaluation.classes, key=lambda one: one.recall)
    return at_least(f"lowest class recall ({worst.name})", worst.recall, bound)


def champion_checks(
    rules: Rules,
    challenger: Evaluation,
    champion: Evaluation,
    hits: tuple[dict[str, bool], dict[str, bool]] | None,
    note: str = "",
) -> list[Check]:
    """The rules that compare with the champion, on the very same samples.

    `hits` tells for challenger and champion whether each sample was told right, None if no rule
    asks for it; `note` is what to say of the champion's evaluation.
    """
    gain = (challenger.correct - champion.correct) / challenger.samples
    gained = at_least("improvement on the champion", gain, rules.min_improvement)
    checks = [Check(gained.holds, gained.words + note)]
    if hits is not None:
        won, lost = discordant(*hits)
        what = f"McNemar p-value ({won} samples won, {lost} lost)"
        checks.append(at_most(what, mcnemar(won, lost), rules.max_p_value))
    return checks


def discordant(challenger: dict[str, bool], champion: dict[str, bool]) -> tuple[int, int]:
    """Samples only the challenger got right, and those only the champion got right.

    Raises:
        InputError: if the two do not hold the same samples.
    """
    if challenger.keys() != champion.keys():
        raise InputError(
            "the predictions of challenger and champion name other samples than their "
            "evaluations: keep predictions.csv beside the evaluation.json it belongs to"
        )
    won = sum(hit and not champion[path] for path, hit in challenger.items())
    lost = sum(champion[path] and not hit for path, hit in challenger.items())
    return won, lost


def mcnemar(won: int, lost: int) -> float:
    """Exact one-sided p-value that the challenger is no better (McNemar 1947, Psychometrika 12).

    The chance of at least `won` heads in `won + lost` fair throws; 1 without any.
    """
    n = won + lost
    term = total = 1
    for heads in range(n, won, -1):
        term = term * heads // (n - heads + 1)
        total += term
    return total / (1 << n)


def verdict_of(checks: list[Check]) -> tuple[bool, str]:
    """Blessed if all hold, and one line that names what decided it."""
    blessed = all(check.holds for check in checks)
    words = "; ".join(check.words for check in checks if check.holds == blessed)
    return blessed, " ".join(f"{'blessed' if blessed else 'not blessed'}: {words}".split())
