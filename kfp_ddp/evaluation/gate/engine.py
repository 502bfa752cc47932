"""The gate step: evaluation and bundle in, verdict out. A failed gate is not a failed step."""

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kfp_ddp import report
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.files import atomic_write
from kfp_ddp.core.run_folder import VERDICT
from kfp_ddp.core.step import step
from kfp_ddp.evaluation.gate import bundled
from kfp_ddp.evaluation.gate.against import against, signed
from kfp_ddp.evaluation.gate.checks import Check, own_checks
from kfp_ddp.evaluation.gate.rules import Rules
from kfp_ddp.evaluation.gate.verdict import markdown, record, verdict_of, without_evaluation
from kfp_ddp.models import attempts
from kfp_ddp.models.champion import find
from kfp_ddp.models.evaluation import FILE, Compared, Evaluation, reason
from kfp_ddp.runs.workspace import open_workspace
from kfp_ddp.storage.destination import open_destination, sha256

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
    gate_report: "dsl.HTML",
    evaluation: str,
    bundle: str,
    rules: Mapping[str, Any],
    champion: str,
    attempt: str,
) -> Judged:
    """Judge the model and write the verdict."""
    checked = Rules.create(**rules)
    with open_workspace(evaluation.rpartition("/")[0], "gate") as folder:
        here = str(folder.download_file(evaluation)) if evaluation else ""
        if here:
            with contextlib.suppress(OSError):  # nothing may be there, or be written
                Path(here).with_name(VERDICT).unlink()
        judged = judge(checked, accuracy, here, champion, bundle)
        version = judged.champion
        blessed, why = verdict_of(judged.checks)
        document = without_evaluation(blessed, judged.checks)
        if here.endswith(f"/{FILE}"):
            document = _leave(Path(here), judged, checked)
    Path(gate_report.path).write_text(document, encoding="utf-8")
    Path(gate_verdict.path).write_text(markdown(blessed, judged.checks), encoding="utf-8")
    gate_verdict.metadata.update({"blessed": blessed, "reason": why, "champion": version})
    print(why)
    if attempt and not blessed:
        where = open_destination(champion)
        attempts.note(where, attempt, version="", champion=version, reason=why)
    return Judged(blessed, version)


class Judgement(NamedTuple):
    """What came of each rule, the bundle judged, the champion: which, where, and the comparison."""

    checks: list[Check]
    bundle: bundled.Bundled | None = None
    champion: str = ""
    champion_uri: str = ""
    compared: Compared | None = None


def _leave(evaluation: Path, judged: Judgement, rules: Rules) -> str:
    """Leave the verdict, and the report with it, beside the evaluation; the report.

    A folder may refuse them where there is no bundle, so that nothing is published by them.

    Raises:
        StorageError: it refuses them, and there is one.
    """
    found, bundle, compared = Evaluation.read(evaluation), judged.bundle, judged.compared
    facts = {
        "model": found.model,
        "split": found.split,
        "samples": found.samples,
        "accuracy": found.accuracy,
        "checkpoint_digest": found.checkpoint_digest,
        "dataset_digest": found.dataset_digest,
        "samples_digest": found.samples_digest,
        "evaluation_sha256": sha256(evaluation),
        "bundle": bundle.version if bundle else "",
        "champion": judged.champion,
        "champion_uri": judged.champion_uri,
        "champion_accuracy": compared.champion_accuracy if compared else None,
        "compared": compared.model_dump(mode="json") if compared else None,
    }
    target = evaluation.with_name(VERDICT)
    with bundle.documents() if bundle else contextlib.nullcontext() as documents:
        try:
            with atomic_write(target) as file:
                file.write(record(judged.checks, rules.given(), facts))
            return report.write(evaluation.parent, documents)
        except OSError as error:
            if bundle is None:
                return report.html(evaluation.parent)
            raise StorageError(
                f"the verdict cannot be written to {target}: {reason(error)}; make the run's "
                "folder writable and give it room"
            ) from None


def judge(
    rules: Rules, accuracy: float, evaluation: str, champion: str, bundle: str = ""
) -> Judgement:
    """Apply the rules.

    Raises:
        InputError: for a rule that lacks what it compares with, or a file that cannot be used.
    """
    if not (math.isfinite(accuracy) and 0 <= accuracy <= 1):
        raise InputError(f"accuracy is {accuracy}: it is a share of the samples, 0 to 1")
    rules.check_inputs(evaluation, bundle, champion)
    found = Evaluation.read(Path(evaluation)) if evaluation else None
    if found is not None and abs(found.accuracy - accuracy) > 1e-6:
        raise InputError(
            f"accuracy is {accuracy} but {evaluation} says {found.accuracy}: connect both to the "
            "same evaluate step"
        )
    judged = Judgement(own_checks(rules, accuracy, found))
    if bundle:
        of_bundle = bundled.read(bundle, Path(evaluation))
        checks = bundled.bundle_checks(rules, of_bundle)
        judged = Judgement(judged.checks + checks, of_bundle)
    if not champion or found is None:
        return judged
    held = find(champion)
    if held is None:
        must = rules.champion_must_exist
        none = Check("champion_must_exist", not must, f"there is no champion at {champion} yet")
        return judged._replace(checks=[*judged.checks, none])
    vouched = signed(rules.champion_key, held)
    if rules.champion_must_exist:
        said = f"there is a champion, {held.version or held.uri}"
        vouched.append(Check("champion_must_exist", True, said))
    came = against(rules, found, Path(evaluation).parent, held)
    return Judgement(
        judged.checks + vouched + came.checks,
        judged.bundle,
        held.version,
        held.uri,
        came.compared,
    )
