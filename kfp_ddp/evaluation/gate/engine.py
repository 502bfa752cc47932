"""The gate step: evaluation and bundle in, verdict out. A model that fails is not a failed step."""

import contextlib
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from kfp_ddp import report
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.files import atomic_write, sha256
from kfp_ddp.core.log import log
from kfp_ddp.core.outputs import GateFacts
from kfp_ddp.core.run_folder import VERDICT
from kfp_ddp.core.settings import Stored
from kfp_ddp.core.step import Artifact, step, write_artifact
from kfp_ddp.core.text import cell
from kfp_ddp.evaluation.gate.champion import compare_with_champion
from kfp_ddp.evaluation.gate.rules import (
    Check,
    Rules,
    check_maximum,
    check_minimum,
    model_checks,
)
from kfp_ddp.models import attempts, variants
from kfp_ddp.models.bundle import INFRA, LATENCY, METRICS, Bundle
from kfp_ddp.models.champion import find, open_bundle
from kfp_ddp.models.evaluation import FILE, Compared, Evaluation, reason
from kfp_ddp.models.signature import signer_of
from kfp_ddp.report.appraisal import TITLES, Appraisal, appraise
from kfp_ddp.report.data import Material
from kfp_ddp.report.render import render
from kfp_ddp.runs.workspace import open_workspace
from kfp_ddp.storage.kinds import open_store

WEAK = 0.8
"""Accuracy below which a blessed model is shown as weak, unless min_accuracy is set."""


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
    gate_verdict: Artifact,
    gate_report: Artifact,
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
            verdict = _verdict(Path(local), judgement, checked)
            document = _write_verdict(Path(local), verdict, judgement.bundle)
            appraisal = appraise(Material.read(Path(local).parent, None), verdict)
        else:
            appraisal = Appraisal(*TITLES[blessed, False])
            document = render("gate.html", title=appraisal.title, checks=judgement.checks)
    write_artifact(gate_report, document)
    facts: GateFacts = {
        "blessed": blessed,
        "reason": why,
        "champion": version,
        "title": appraisal.title,
        "level": appraisal.level,
        "words": appraisal.words,
        "causes": "; ".join(appraisal.causes),
    }
    write_artifact(gate_verdict, markdown(appraisal, judgement.checks), **facts)
    log.info(why)
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
    opened = read_bundle(bundle, Path(evaluation)) if bundle else None
    if opened is not None:
        checks += bundle_checks(rules, opened)
    if not champion or record is None:
        return Judgement(checks, opened)
    signer = signer_of(rules.champion_key, "champion_key")
    current = find(champion, not rules.champion_must_exist, signer)
    if current is None:
        words = f"there is no champion at {champion} yet"
        checks.append(Check("champion_must_exist", not rules.champion_must_exist, words))
        return Judgement(checks, opened)
    if signer is not None:
        words = f"the champion is signed by {signer.name}"
        checks.append(Check("champion_key", True, words))
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


def markdown(appraisal: Appraisal, checks: Sequence[Check]) -> str:
    """Return the verdict as a heading, what it means, and a list of the checks, for the KFP UI."""
    lines = [f"## {appraisal.title}", "", cell(appraisal.words), ""]
    lines += [f"- likely cause: {cell(cause)}" for cause in appraisal.causes]
    lines += [f"- {'holds' if c.holds else '**fails**'}: {cell(c.words)}" for c in checks]
    return "\n".join(lines) + "\n"


def _write_verdict(evaluation: Path, verdict: Mapping[str, Any], bundle: Bundle | None) -> str:
    """Write verdict and report beside the evaluation and return the report.

    Without a bundle the folder may be read-only, as nothing is published with the verdict.
    """
    target = evaluation.with_name(VERDICT)
    text = json.dumps(verdict, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    with _documents(bundle) if bundle else contextlib.nullcontext() as documents:
        try:
            with atomic_write(target) as file:
                file.write(text.encode())
            return report.write(evaluation.parent, documents)
        except OSError as error:
            if bundle is None:
                return report.html(evaluation.parent)
            raise StorageError(
                f"the verdict cannot be written to {target}: {reason(error)}; make the run's "
                "folder writable and free space"
            ) from None


def _verdict(evaluation: Path, judgement: Judgement, rules: Rules) -> dict[str, Any]:
    """Return the verdict, for JSON. Equal inputs give equal ones."""
    record = Evaluation.read(evaluation)
    bundle = judgement.bundle
    compared = judgement.compared
    blessed, why = verdict_of(judgement.checks)
    fields = ("model", "split", "samples", "accuracy", "checkpoint_digest", "dataset_digest")
    return {
        "format": 1,
        "blessed": blessed,
        "weak": record.is_weak(rules.min_accuracy or WEAK) or bool(record.never_right),
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


_LARGEST = 1 << 20
_BATCH = "batch_1"


class _Time(Stored):
    median_ms: float


class _Served(Stored):
    """Result of one file in a process with only the runtime."""

    failed: str = ""
    latency: dict[str, _Time] = Field(default_factory=dict)
    memory_mb: float | None = None


class _Infra(Stored):
    passed: bool
    reason: str = ""
    files: dict[str, _Served] = Field(default_factory=dict)


class _Latency(Stored):
    runtimes: dict[str, dict[str, _Time]] = Field(default_factory=dict)


@contextlib.contextmanager
def _documents(bundle: Bundle) -> Iterator[Path]:
    """Yield a folder with the listed JSON records, for the report."""
    with tempfile.TemporaryDirectory() as folder:
        for name in bundle.listed:
            if name.endswith(".json") and "/" not in name:
                content = bundle.read(name, variants.LARGEST)
                Path(folder, name).write_bytes(content or b"")
        yield Path(folder)


def read_bundle(address: str, evaluation: Path) -> Bundle:
    """Return the bundle of an evaluation; refuse one that is damaged or of another evaluation."""
    bundle = open_bundle(address, "export the model again")
    if bundle.listed.get(METRICS) != sha256(evaluation):
        raise InputError(
            f"the bundle {address} is not of {evaluation}: give evaluate, export and gate the same "
            "checkpoint, in this order"
        )
    return bundle


def bundle_checks(rules: Rules, bundle: Bundle) -> list[Check]:
    """Apply the rules on the bundle. Incorrect answers while serving always fail."""
    infra = bundle.record(INFRA, _Infra, _LARGEST)
    latency = bundle.record(LATENCY, _Latency, _LARGEST) or _Latency()
    checks = [*_serves(rules.must_serve, infra), *_budgets(rules, infra, latency)]
    if rules.max_bundle_mb:
        size = sum(size for _, size in bundle.where.list(bundle.folder)) / 1e6
        bound = rules.max_bundle_mb
        checks.append(check_maximum("max_bundle_mb", "MB of the bundle", size, bound, decimals=1))
    return [*checks, *_variants(rules, variants.read(bundle))]


def _serves(must: bool, infra: _Infra | None) -> Iterator[Check]:
    rule = "must_serve"
    if infra is None or not infra.files:
        why = infra.reason if infra else "it was not tried in a process with only the runtime"
        if must:
            yield Check(rule, False, f"the bundle may not serve: {why}")
    elif infra.passed:
        yield Check(rule, True, f"can be served: {', '.join(sorted(infra.files))}")
    else:
        yield Check(rule, False, f"cannot be served: {infra.reason or 'it failed'}")


def _budgets(rules: Rules, infra: _Infra | None, latency: _Latency) -> Iterator[Check]:
    """Apply the limits of latency and memory to the file `budget_of`."""
    served = infra.files if infra else {}
    # What a process with only the runtime took counts more than the times of the export.
    times = dict(latency.runtimes)
    times.update({name: file.latency for name, file in served.items() if file.latency})
    taken = {name: time[_BATCH].median_ms for name, time in times.items() if _BATCH in time}
    used = {name: file.memory_mb for name, file in served.items() if file.memory_mb is not None}
    for rule, kind, unit, values, decimals in (
        ("max_latency_ms", "latency", "milliseconds for one image by", taken, 2),
        ("max_memory_mb", "memory", "MB of memory to serve", used, 1),
    ):
        bound = getattr(rules, rule)
        name = rules.budget_of
        if bound and name in values:
            yield check_maximum(rule, f"{unit} {name}", values[name], bound, decimals)
        elif bound:
            names = ", ".join(sorted(values)) or "none"
            words = f"no {kind} of {name} was measured (measured: {names})"
            yield Check(rule, False, words, None, bound)


def _variants(rules: Rules, record: variants.VariantsRecord) -> Iterator[Check]:
    """Apply the rules of the model and of variants to each variant."""
    for name, why in record.left_out.items():
        yield Check("variants", True, f"variant {name} is left out: {why}")
    for rule in rules.need_bundle:
        if "variant" in rule and not record.variants:
            yield Check(rule, True, "the bundle has no variants")
    for one in record.variants:
        checks = model_checks(rules, one.evaluation.accuracy, one.evaluation)
        if rules.max_variant_loss < 1:
            limit = rules.max_variant_loss
            checks.append(check_maximum("max_variant_loss", "loss of accuracy", -one.gain, limit))
        if rules.min_variant_agreement > 0:
            label = "agreement with the model"
            bound = rules.min_variant_agreement
            checks.append(check_minimum("min_variant_agreement", label, one.agreement, bound))
        for check in checks:
            yield replace(check, words=f"variant {one.name}: {check.words}")
