"""Rules on the bundle: size, latency, memory, variants and serving."""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import Stored
from kfp_ddp.evaluation.gate.rules import Check, Rules, at_least, at_most, model_checks
from kfp_ddp.models import variants
from kfp_ddp.models.bundle import METRICS
from kfp_ddp.models.bundle import Bundle as StoredBundle
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import sha256

INFRA, LATENCY = "infra.json", "latency.json"
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


class Bundle(NamedTuple):
    """Records of a bundle that its manifest lists."""

    sealed: StoredBundle
    size: int
    """Bytes of all files."""
    infra: _Infra | None
    latency: _Latency
    variants: variants.Record

    @property
    def version(self) -> str:
        """Version of the bundle."""
        return self.sealed.version

    @contextmanager
    def documents(self) -> Iterator[Path]:
        """Yield a folder with the listed JSON records, for the report."""
        with tempfile.TemporaryDirectory() as folder:
            for name in self.sealed.listed or {}:
                if name.endswith(".json") and "/" not in name:
                    content = self.sealed.read(name, variants.LARGEST)
                    Path(folder, name).write_bytes(content or b"")
            yield Path(folder)


def read(bundle: str, evaluation: Path) -> Bundle:
    """Read the bundle of an evaluation, by its folder or URI.

    Raises:
        InputError: The bundle is missing, damaged or of another evaluation.
    """
    store = open_store(bundle)
    sealed = StoredBundle.at(store, "", "the bundle", "export the model again")
    if sealed.listed is None:
        raise InputError(f"there is no bundle at {bundle}: connect the bundle output of export")
    if sealed.listed.get(METRICS) != sha256(evaluation):
        raise InputError(
            f"the bundle {bundle} is not of {evaluation}: give evaluate, export and gate the same "
            "checkpoint, in this order"
        )
    return Bundle(
        sealed=sealed,
        size=sum(size for _, size in store.list("")),
        infra=sealed.record(INFRA, _Infra, _LARGEST),
        latency=sealed.record(LATENCY, _Latency, _LARGEST) or _Latency(),
        variants=sealed.record(variants.FILE, variants.Record, variants.LARGEST)
        or variants.Record(),
    )


def bundle_checks(rules: Rules, bundle: Bundle) -> list[Check]:
    """Apply the rules on the bundle. Incorrect answers while serving always fail."""
    return [
        *_serves(rules.must_serve, bundle.infra),
        *_latency(rules.max_latency_ms, rules.budget_of, bundle),
        *_memory(rules.max_memory_mb, rules.budget_of, bundle.infra),
        *([_size(rules.max_bundle_mb, bundle.size)] if rules.max_bundle_mb else []),
        *_variants(rules, bundle.variants),
    ]


def _serves(must: bool, infra: _Infra | None) -> Iterator[Check]:
    rule = "must_serve"
    if infra is None or not infra.files:
        reason = infra.reason if infra else "it was not tried in a process with only the runtime"
        if must:
            yield Check(rule, False, f"the bundle may not serve: {reason}")
    elif infra.passed:
        yield Check(rule, True, f"the bundle serves: {', '.join(sorted(infra.files))}")
    else:
        yield Check(rule, False, f"the bundle does not serve: {infra.reason or 'it failed'}")


def _latency(bound: float, name: str, bundle: Bundle) -> Iterator[Check]:
    rule = "max_latency_ms"
    if not bound:
        return
    served = bundle.infra.files.get(name) if bundle.infra else None
    times = served.latency if served and served.latency else bundle.latency.runtimes.get(name, {})
    if _BATCH in times:
        label = f"milliseconds for one image by {name}"
        yield at_most(rule, label, times[_BATCH].median_ms, bound, decimals=2)
    else:
        yield _unmeasured(rule, "latency", name, bundle.latency.runtimes, bound)


def _memory(bound: float, name: str, infra: _Infra | None) -> Iterator[Check]:
    rule = "max_memory_mb"
    if not bound:
        return
    files = infra.files if infra else {}
    used = files[name].memory_mb if name in files else None
    if used is None:
        measured = [file for file, one in files.items() if one.memory_mb is not None]
        yield _unmeasured(rule, "memory", name, measured, bound)
    else:
        yield at_most(rule, f"MB of memory to serve {name}", used, bound, decimals=1)


def _unmeasured(
    rule: str, quantity: str, name: str, measured: Iterable[str], bound: float
) -> Check:
    names = ", ".join(sorted(measured)) or "none"
    words = f"no {quantity} of {name} was measured (measured: {names})"
    return Check(rule, False, words, None, bound)


def _size(bound: float, size: int) -> Check:
    return at_most("max_bundle_mb", "MB of the bundle", size / 1e6, bound, decimals=1)


def _variants(rules: Rules, record: variants.Record) -> Iterator[Check]:
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
            checks.append(at_most("max_variant_loss", "loss of accuracy", loss, limit))
        if rules.min_variant_agreement > 0:
            label, bound = "agreement with the model", rules.min_variant_agreement
            checks.append(at_least("min_variant_agreement", label, one.agreement, bound))
        for check in checks:
            yield replace(check, words=f"variant {one.name}: {check.words}")
