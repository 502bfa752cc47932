"""Rules on the bundle: size, latency, memory, variants and serving."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pydantic import Field

from kfp_ddp.core.digest import sha256
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import Stored
from kfp_ddp.evaluation.gate.rules import Check, Rules, check_maximum, check_minimum, model_checks
from kfp_ddp.models import variants
from kfp_ddp.models.bundle import INFRA, LATENCY, METRICS, Bundle
from kfp_ddp.models.champion import open_bundle

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


@contextmanager
def documents(bundle: Bundle) -> Iterator[Path]:
    """Yield a folder with the listed JSON records, for the report."""
    with tempfile.TemporaryDirectory() as folder:
        for name in bundle.listed:
            if name.endswith(".json") and "/" not in name:
                content = bundle.read(name, variants.LARGEST)
                Path(folder, name).write_bytes(content or b"")
        yield Path(folder)


def read(address: str, evaluation: Path) -> Bundle:
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
        label, bound = "MB of the bundle", rules.max_bundle_mb
        checks.append(check_maximum("max_bundle_mb", label, size, bound, decimals=1))
    return [*checks, *_variants(rules, variants.read(bundle))]


def _serves(must: bool, infra: _Infra | None) -> Iterator[Check]:
    rule = "must_serve"
    if infra is None or not infra.files:
        reason = infra.reason if infra else "it was not tried in a process with only the runtime"
        if must:
            yield Check(rule, False, f"the bundle may not serve: {reason}")
    elif infra.passed:
        yield Check(rule, True, f"can be served: {', '.join(sorted(infra.files))}")
    else:
        yield Check(rule, False, f"cannot be served: {infra.reason or 'it failed'}")


def _budgets(rules: Rules, infra: _Infra | None, latency: _Latency) -> Iterator[Check]:
    """Apply the limits of latency and memory to the file `budget_of`."""
    served = infra.files if infra else {}
    times = {**latency.runtimes, **{n: f.latency for n, f in served.items() if f.latency}}
    taken = {name: time[_BATCH].median_ms for name, time in times.items() if _BATCH in time}
    used = {name: file.memory_mb for name, file in served.items() if file.memory_mb is not None}
    for rule, kind, unit, values, decimals in (
        ("max_latency_ms", "latency", "milliseconds for one image by", taken, 2),
        ("max_memory_mb", "memory", "MB of memory to serve", used, 1),
    ):
        bound, name = getattr(rules, rule), rules.budget_of
        if bound and name in values:
            yield check_maximum(rule, f"{unit} {name}", values[name], bound, decimals)
        elif bound:
            names = ", ".join(sorted(values)) or "none"
            words = f"no {kind} of {name} was measured (measured: {names})"
            yield Check(rule, False, words, None, bound)


def _variants(rules: Rules, record: variants.VariantsRecord) -> Iterator[Check]:
    """Apply the rules of the model and of variants to each variant."""
    for name, reason in record.left_out.items():
        yield Check("variants", True, f"variant {name} is left out: {reason}")
    for rule in rules.need_bundle:
        if "variant" in rule and not record.variants:
            yield Check(rule, True, "the bundle has no variants")
    for one in record.variants:
        checks = model_checks(rules, one.evaluation.accuracy, one.evaluation)
        if rules.max_variant_loss < 1:
            loss, limit = -one.gain, rules.max_variant_loss
            checks.append(check_maximum("max_variant_loss", "loss of accuracy", loss, limit))
        if rules.min_variant_agreement > 0:
            label, bound = "agreement with the model", rules.min_variant_agreement
            checks.append(check_minimum("min_variant_agreement", label, one.agreement, bound))
        for check in checks:
            yield replace(check, words=f"variant {one.name}: {check.words}")
