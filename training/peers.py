"""What trainings beside this one came to, whose folders lie beside its own: trials of a sweep."""

import json
import statistics
from pathlib import Path

from kfp_ddp.core.run_folder import RunFolder

ENOUGH = 2
"""Others that have to be as far before this one is compared with them."""


def behind(output_dir: Path, epoch: int, best: float) -> str:
    """Why this training is not worth going on with; empty where it is.

    It is not where its best accuracy is below the median of what others had by the same epoch, the
    median stopping rule (Golovin et al. 2017, Google Vizier, section 3.2.2).

    Args:
        output_dir: Of this training.
        epoch: How many it has trained.
        best: Its highest accuracy so far.
    """
    others = sorted(output_dir.parent.glob(f"*/{RunFolder('').metrics.name}"))
    told = [_best_by(file, epoch) for file in others if file.parent != output_dir]
    known = [each for each in told if each is not None]
    if len(known) < ENOUGH or best >= (median := statistics.median(known)):
        return ""
    return (
        f"after epoch {epoch} its best accuracy, {best:.2%}, is below {median:.2%}, the median of "
        f"{len(known)} others by then"
    )


def _best_by(metrics: Path, epoch: int) -> float | None:
    """The highest accuracy until an epoch; None where the training is not as far."""
    found: list[tuple[float, float]] = []
    try:
        lines = metrics.read_bytes().splitlines()
    except OSError:
        return None
    for line in lines:
        try:
            event = json.loads(line)
            if event["event"] == "eval":
                found.append((float(event["epoch"]), float(event["accuracy"])))
        except (ValueError, LookupError, TypeError):
            continue  # a line that is being written
    until = [accuracy for at, accuracy in found if at <= epoch]
    return max(until) if until and max(at for at, _ in found) >= epoch else None
