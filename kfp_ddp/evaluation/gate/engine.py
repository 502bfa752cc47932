"""The gate step: evaluation and bundle in, verdict out. A model that fails is not a failed step."""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kfp_ddp import report
from kfp_ddp.core.digest import sha256
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.files import atomic_write
from kfp_ddp.core.run_folder import VERDICT
from kfp_ddp.core.step import step
from kfp_ddp.core.text import cell
from kfp_ddp.evaluation.gate import bundle as bundles
from kfp_ddp.evaluation.gate.champion import check_signature, compare_with_champion
from kfp_ddp.evaluation.gate.rules import Check, Rules, model_checks
from kfp_ddp.models import attempts
from kfp_ddp.models.bundle import Bundle
from kfp_ddp.models.champion import find
from kfp_ddp.models.evaluation import FILE, Compared, Evaluation, reason
from kfp_ddp.report.render import render
from kfp_ddp.runs.workspace import open_workspace
from kfp_ddp.storage.kinds import open_store

if TYPE_CHECKING:
    from kfp import dsl

FORMAT = 1


class Judgement(NamedTuple):
    """Checks, the judged bundle, version and URI of the champion, and the comparison with it."""

    checks: list[Check]
    bundle: Bundle | None = None
    champion: str = ""
    champion_uri: str = ""
    compared: Compared | None = None


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
) -> tuple[bool, str]:
    """Judge the model, write the verdict; return it and the version of the compared champion."""
    checked = Rules.create(**rules)
    with open_workspace(evaluation.rpartition("/")[0], "gate") as folder:
        local = str(folder.download_file(evaluation)) if evaluation else ""
        if local:
            with contextlib.suppress(OSError):  # missing, or read-only
                Path(local).with_name(VERDICT).unlink()
        judgement = judge(checked, accuracy, local, champion, bundle)
        version = judgement.champion
        blessed, why = verdict_of(judgement.checks)
        if local.endswith(f"/{FILE}"):
            document = _write_verdict(Path(local), judgement, checked)
        else:
            title = "Blessed" if blessed else "Not blessed"
            document = render("gate.html", title=title, checks=judgement.checks)
    Path(gate_report.path).write_text(document, encoding="utf-8")
    Path(gate_verdict.path).write_text(markdown(blessed, judgement.checks), encoding="utf-8")
    gate_verdict.metadata.update({"blessed": blessed, "reason": why, "champion": version})
    print(why)
    if attempt and not blessed:
        store = open_store(champion)
        attempts.note(store, attempt, version="", champion=version, reason=why)
    return blessed, version


def judge(
    rules: Rules, accuracy: float, evaluation: str, champion: str, bundle: str = ""
) -> Judgement:
    """Apply the rules; raise InputError if an input of a rule is missing, or a file is invalid."""
    if not (math.isfinite(accuracy) and 0 <= accuracy <= 1):
        raise InputError(f"accuracy is {accuracy}: it is a share of the samples, 0 to 1")
    rules.check_inputs(evaluation, bundle, champion)
    record = Evaluation.read(Path(evaluation)) if evaluation else None
    if record is not None and abs(record.accuracy - accuracy) > 1e-6:
        raise InputError(
            f"accuracy is {accuracy} but {evaluation} has {record.accuracy}: connect both to the "
            "same evaluate step"
        )
    checks = model_checks(rules, accuracy, record)
    opened = bundles.read(bundle, Path(evaluation)) if bundle else None
    if opened is not None:
        checks += bundles.bundle_checks(rules, opened)
    if not champion or record is None:
        return Judgement(checks, opened)
    current = find(champion, may_be_first=not rules.champion_must_exist)
    if current is None:
        words = f"there is no champion at {champion} yet"
        checks.append(Check("champion_must_exist", not rules.champion_must_exist, words))
        return Judgement(checks, opened)
    checks += check_signature(rules.champion_key, current)
    if rules.champion_must_exist:
        words = f"there is a champion, {current.version or current.uri}"
        checks.append(Check("champion_must_exist", True, words))
    gain, compared = compare_with_champion(rules, record, Path(evaluation).parent, current)
    return Judgement(checks + gain, opened, current.version, current.uri, compared)


def verdict_of(checks: Sequence[Check]) -> tuple[bool, str]:
    """Return whether all checks hold, and one line with the checks that decided it."""
    blessed = all(check.holds for check in checks)
    words = "; ".join(check.words for check in checks if check.holds == blessed)
    return blessed, " ".join(f"{'blessed' if blessed else 'not blessed'}: {words}".split())


def markdown(blessed: bool, checks: Sequence[Check]) -> str:
    """Return the verdict as a heading and a list of the checks, for the KFP UI."""
    doubt = not blessed and all(check.holds or check.unproven for check in checks)
    title = "Not blessed: too few samples to tell" if doubt else "Not blessed"
    lines = [f"## {'Blessed' if blessed else title}", ""]
    lines += [f"- {'holds' if c.holds else '**fails**'}: {cell(c.words)}" for c in checks]
    return "\n".join(lines) + "\n"


def _write_verdict(evaluation: Path, judgement: Judgement, rules: Rules) -> str:
    """Write verdict and report beside the evaluation and return the report.

    Without a bundle the folder may be read-only, as nothing is published with the verdict.
    """
    bundle, target = judgement.bundle, evaluation.with_name(VERDICT)
    with bundles.documents(bundle) if bundle else contextlib.nullcontext() as documents:
        try:
            with atomic_write(target) as file:
                file.write(_verdict(evaluation, judgement, rules))
            return report.write(evaluation.parent, documents)
        except OSError as error:
            if bundle is None:
                return report.html(evaluation.parent)
            raise StorageError(
                f"the verdict cannot be written to {target}: {reason(error)}; make the run's "
                "folder writable and free space"
            ) from None


def _verdict(evaluation: Path, judgement: Judgement, rules: Rules) -> bytes:
    """Return the verdict as JSON. Equal inputs give equal bytes."""
    record, bundle, compared = Evaluation.read(evaluation), judgement.bundle, judgement.compared
    blessed, why = verdict_of(judgement.checks)
    fields = ("model", "split", "samples", "accuracy", "checkpoint_digest", "dataset_digest")
    document = {
        "format": FORMAT,
        "blessed": blessed,
        "reason": why,
        **{name: getattr(record, name) for name in (*fields, "samples_digest")},
        "evaluation_sha256": sha256(evaluation),
        "bundle": bundle.exported_version if bundle else "",
        "champion": judgement.champion,
        "champion_uri": judgement.champion_uri,
        "champion_accuracy": compared.champion_accuracy if compared else None,
        "compared": compared.model_dump(mode="json") if compared else None,
        "asked": dict(sorted(rules.explicit().items())),
        "rules": [vars(check) for check in judgement.checks],
    }
    return (json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
