"""An evaluation by ranks, each with its share of the samples; the first one writes."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kfp_ddp import report
from kfp_ddp.core.errors import InputError, writing
from kfp_ddp.core.log import log
from kfp_ddp.core.run_folder import LABELS_TO_CHECK, REPORT, RunFolder
from kfp_ddp.core.text import plural
from kfp_ddp.datasets.access import local_dataset, using
from kfp_ddp.evaluation import results
from kfp_ddp.evaluation.comparison import compare
from kfp_ddp.evaluation.request import EvaluationRequest
from kfp_ddp.models import champion as champions
from kfp_ddp.models.bundle import REFERENCE
from kfp_ddp.models.evaluation import CHAMPION_FOLDER, FILE, PREDICTIONS, Compared, Evaluation
from kfp_ddp.models.signature import signer_of
from kfp_ddp.pictures.sides import TEST
from kfp_ddp.report.data import ReportData
from kfp_ddp.runs.workspace import RunWorkspace

if TYPE_CHECKING:
    from kfp_ddp.evaluation.roc import Roc
    from kfp_ddp.training.distributed import World

ROC = "roc.json"
"""File with the ROC curve, or null."""


class Evaluated(NamedTuple):
    """Record of a split, its ROC, the HTML report, and the record of test beside val."""

    result: Evaluation
    roc: "Roc | None"
    document: str
    test: Evaluation | None

    @classmethod
    def read(cls, folder: Path) -> "Evaluated":
        """Read the files that the ranks wrote; raise InputError if there is no evaluation."""
        from kfp_ddp.evaluation.roc import Roc

        result = Evaluation.read(folder / FILE)
        data = ReportData.model_validate_json((folder / report.REPORT_DATA).read_bytes())
        curve = json.loads((folder / ROC).read_bytes())
        document = (folder / REPORT).read_text(encoding="utf-8")
        return cls(result, Roc(**curve) if curve else None, document, data.test)


@contextlib.contextmanager
def with_local_folders(
    request: EvaluationRequest, folder: RunWorkspace
) -> Iterator[EvaluationRequest]:
    """Yield the request with local folders; what is not local is downloaded."""
    checkpoint = str(folder.download(request.checkpoint)) if request.of_run else request.checkpoint
    with local_dataset(request.data, folder.path) as data, using("evaluate", request.run_dir, data):
        yield request.changed(checkpoint=checkpoint, run_dir=str(folder.path), data=str(data))


def evaluate_share(request: EvaluationRequest, world: "World | None" = None) -> None:
    """Evaluate on a split, with val also on test, and write the files below `run_dir`.

    A champion whose own evaluation is of other samples is evaluated on these, too. The record comes
    last. No `world` means a single process. Raise InputError if an input is invalid.
    """
    checkpoint = Path(request.checkpoint) if request.of_run else request.checkpoint
    if isinstance(checkpoint, Path) and not checkpoint.is_dir():
        raise InputError(
            f"there is no checkpoint {checkpoint}: give the step folder that train returned"
        )
    signer = signer_of(request.options.champion_key, "champion_key")
    champion = champions.find(request.champion, True, signer) if request.champion else None
    run_dir = Path(request.run_dir)
    target = request.target
    if world is None or world.first:
        results.prepare(target, run_dir)
    started = time.monotonic()
    # Inputs are checked before torch is imported, which takes seconds.
    from kfp_ddp.evaluation import label_check
    from kfp_ddp.evaluation.evaluator import Evaluator
    from kfp_ddp.evaluation.report_data import report_data

    evaluator = Evaluator(request, checkpoint, world, signer)
    first = evaluator.split(started)
    on_test = evaluator.test()
    again = evaluator.re_evaluate_champion(champion, first) if champion is not None else None
    training, uncompared = evaluator.training()
    if first is None:
        return
    predictions, result = first
    rows = predictions.to_csv()
    if champion is not None:
        if again is not None:
            log.info(f"champion {champion.uri} on this split: accuracy {again.accuracy:.4f}")
        gain = _compared(result, rows, champion, again, target / CHAMPION_FOLDER)
        result = result.model_copy(update={"compared": gain})
    splits = [predictions]
    test: Evaluation | None = None
    if on_test is not None:
        splits.append(on_test.predictions)
        test = on_test.result
        folder = RunFolder(run_dir).evaluation(TEST)
        results.prepare(folder, run_dir)
        results.write(folder, run_dir, test, {PREDICTIONS: on_test.predictions.to_csv()})
    least_score = 1 - result.accuracy
    doubts = label_check.find_doubts(splits, training, evaluator.dataset, least_score)
    if doubts:
        log.info(f"{plural(len(doubts), 'label')} to check: {target / LABELS_TO_CHECK}")
    data = report_data(
        predictions,
        evaluator.info,
        run_dir=run_dir,
        dataset=evaluator.dataset,
        split=request.split,
        worst=request.worst,
        test=test,
        doubts=doubts,
        uncompared=uncompared,
        least_score=least_score,
    )
    roc = predictions.tally.areas().roc
    texts = {
        PREDICTIONS: rows,
        REFERENCE: predictions.sample.to_csv(),
        LABELS_TO_CHECK: label_check.to_csv(doubts),
        report.REPORT_DATA: data.model_dump_json(),
        ROC: json.dumps(roc and vars(roc)),
    }
    results.write(target, run_dir, result, texts)
    with writing(target, results.ADVICE):
        report.write(target, root=run_dir)


def _compared(
    result: Evaluation,
    predictions: str,
    champion: champions.Champion,
    again: Evaluation | None,
    folder: Path,
) -> Compared | None:
    """Compare with the champion; `again` is its evaluation on these samples, in `folder`."""
    other = again or champion.evaluation
    if not other.same_samples(result):
        return None
    own_predictions = result.parse_predictions(predictions.encode(), PREDICTIONS)
    try:
        other_predictions = (
            again.read_predictions(folder) if again is not None else champion.predictions()
        )
    except InputError as error:
        log.info(f"the gain on the champion has no interval: {error}")
        other_predictions = None
    both = None if other_predictions is None else (own_predictions, other_predictions)
    return compare(result, other, both, where=champion.uri, version=champion.version)
