"""An evaluation by the ranks of a world, each of which takes its share; the first one writes."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kfp_ddp import report
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.run_folder import REPORT, RunFolder
from kfp_ddp.evaluation import results
from kfp_ddp.evaluation.comparison import compare
from kfp_ddp.evaluation.request import Request
from kfp_ddp.models import champion as champions
from kfp_ddp.models.evaluation import AGAIN, FILE, PREDICTIONS, Compared, Evaluation
from kfp_ddp.report.data import ReportData
from kfp_ddp.training.sides import TEST

if TYPE_CHECKING:
    from kfp_ddp.evaluation.roc import Roc
    from kfp_ddp.training.distributed import World

ROC = "roc.json"
"""Beside an evaluation: the curve, where there is one."""


class Evaluated(NamedTuple):
    """The record of a split, its ROC and the HTML report, and the record of test beside val."""

    result: Evaluation
    roc: "Roc | None"
    document: str
    test: Evaluation | None

    @classmethod
    def read(cls, folder: Path) -> "Evaluated":
        """What ranks left in the folder of an evaluation.

        Raises:
            InputError: there is none.
        """
        from kfp_ddp.evaluation.roc import Roc

        result = Evaluation.read(folder / FILE)
        left = ReportData.model_validate_json((folder / report.REPORT_DATA).read_bytes())
        curve = json.loads((folder / ROC).read_bytes())
        document = (folder / REPORT).read_text(encoding="utf-8")
        return cls(result, Roc(**curve) if curve else None, document, left.test)


def evaluate(
    checkpoint: Path | str,
    run_dir: Path,
    dataset: Path,
    split: str,
    batch_size: int,
    worst: int,
    champion: str = "",
    options: Mapping[str, Any] = {},
) -> Evaluated:
    """Evaluate on a split in this process alone; the rest is as in `evaluate_share`.

    A checkpoint as text may be a bundle, or an address.
    """
    request = Request.create(
        checkpoint=str(checkpoint),
        of_run=isinstance(checkpoint, Path),
        run_dir=str(run_dir),
        data=str(dataset),
        split=split,
        batch_size=batch_size,
        worst=worst,
        champion=champion,
        options=dict(options),
    )
    found = evaluate_share(request)
    assert found is not None  # the first of one
    return found


def evaluate_share(request: Request, world: "World | None" = None) -> Evaluated | None:
    """Evaluate on a split, and with val on test too; all is also written below `run_dir`.

    A champion whose own evaluation is of other samples is evaluated on these too. The record is
    written last, so that an evaluation that was interrupted is none.

    Args:
        request: The same on all ranks, with folders that are at hand.
        world: This rank among the others; None for a process alone.

    Returns:
        What was found, on the first rank; None on the others.

    Raises:
        InputError: for a checkpoint, split, champion or parameter that cannot be used.
    """
    checkpoint = _checkpoint(request)
    held = champions.find(request.champion) if request.champion else None
    run_dir, target = Path(request.run_dir), request.target
    if world is None or world.first:
        results.prepare(target, run_dir)
    started = time.monotonic()
    # From here on torch is needed, which takes seconds to import.
    from kfp_ddp.evaluation.evaluator import Evaluator
    from kfp_ddp.evaluation.ingredients import ingredients

    here = Evaluator(request, checkpoint, world)
    first, of_test = here.split(started), here.test()
    again = here.champion_again(held, first) if held is not None else None
    if first is None:
        return None
    found, result = first
    predictions = found.to_csv()
    if held is not None:
        if again is not None:
            print(f"champion {held.uri} on this split: accuracy {again.accuracy:.4f}")
        compared = _compared(result, predictions, held, again, target / AGAIN)
        result = result.model_copy(update={"compared": compared})
    if of_test is not None:
        folder = RunFolder(run_dir).evaluation(TEST)
        results.prepare(folder, run_dir)
        results.write(folder, run_dir, of_test.result, {PREDICTIONS: of_test.found.to_csv()})
    test = of_test and of_test.result
    left = ingredients(
        found,
        here.info,
        run_dir=run_dir,
        dataset=here.dataset,
        split=request.split,
        worst=request.worst,
        test=test,
    )
    roc = found.tally.roc()
    texts = {
        PREDICTIONS: predictions,
        report.REPORT_DATA: left.model_dump_json(),
        ROC: json.dumps(roc and vars(roc)),
    }
    results.write(target, run_dir, result, texts)
    return Evaluated(result, roc, results.report(target, run_dir), test)


def _checkpoint(request: Request) -> Path | str:
    """What is to be evaluated, as `subject.read` takes it; raises InputError as soon as can be."""
    request.check()
    if not request.of_run:
        return request.checkpoint
    checkpoint = Path(request.checkpoint)
    if not checkpoint.is_dir():
        raise InputError(
            f"there is no checkpoint {checkpoint}: give the step folder that train returned"
        )
    return checkpoint


def _compared(
    result: Evaluation,
    predictions: str,
    held: champions.Champion,
    again: Evaluation | None,
    folder: Path,
) -> Compared | None:
    """The model against the champion, `again` being its evaluation in `folder` on these samples."""
    theirs = again or held.evaluation
    if not theirs.same_samples(result):
        return None
    told = result.told(predictions.encode(), PREDICTIONS)
    try:
        its = again.read_told(folder) if again is not None else held.told()
    except InputError as error:
        print(f"the gain on the champion has no interval: {error}")
        its = None
    both = None if its is None else (told, its)
    return compare(result, theirs, both, where=held.uri, version=held.version)
