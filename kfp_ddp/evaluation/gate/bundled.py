"""The rules that look at what serves: the bundle's sizes, times, memory and variants."""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import Field, ValidationError

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import Stored, first_fault
from kfp_ddp.evaluation.gate.checks import Check, at_least, at_most, own_checks
from kfp_ddp.evaluation.gate.rules import Rules
from kfp_ddp.models import variants
from kfp_ddp.models.bundle import METRICS
from kfp_ddp.models.sealed import Sealed
from kfp_ddp.storage.destination import open_destination, sha256

INFRA, LATENCY = "infra.json", "latency.json"
_LARGEST = 1 << 20
_BATCH = "batch_1"


class _Time(Stored):
    median_ms: float


class _Asked(Stored):
    """What a process with the runtime alone came to with one file."""

    failed: str = ""
    latency: dict[str, _Time] = Field(default_factory=dict)
    memory_mb: float | None = None


class _Infra(Stored):
    passed: bool
    reason: str = ""
    files: dict[str, _Asked] = Field(default_factory=dict)


class _Latency(Stored):
    runtimes: dict[str, dict[str, _Time]] = Field(default_factory=dict)


class Bundled(NamedTuple):
    """What a bundle tells of itself, as its manifest lists it."""

    sealed: Sealed
    size: int
    """Bytes of all its files."""
    infra: _Infra | None
    latency: _Latency
    variants: variants.Record

    @property
    def version(self) -> str:
        """What it is called."""
        return self.sealed.version

    @contextmanager
    def documents(self) -> Iterator[Path]:
        """A folder with its own records, for the report: no weights, nothing that is not listed."""
        with tempfile.TemporaryDirectory() as folder:
            for name in self.sealed.listed or {}:
                if name.endswith(".json") and "/" not in name:
                    content = self.sealed.read(name, variants.LARGEST)
                    Path(folder, name).write_bytes(content or b"")
            yield Path(folder)


M = TypeVar("M", bound=Stored)


def read(bundle: str, evaluation: Path) -> Bundled:
    """A bundle, if it is whole and of this evaluation.

    Args:
        bundle: Folder or address.
        evaluation: The file that export was given.

    Raises:
        InputError: it is not there, damaged, or of another evaluation.
    """
    where = open_destination(bundle)
    found = Sealed.at(where, "", "the bundle", "export the model again")
    if found.listed is None:
        raise InputError(f"there is no bundle at {bundle}: connect the bundle output of export")
    if found.listed.get(METRICS) != sha256(evaluation):
        raise InputError(
            f"the bundle {bundle} is not of {evaluation}: give evaluate, export and gate the same "
            "checkpoint, in this order"
        )
    return Bundled(
        sealed=found,
        size=sum(size for _, size in where.list("")),
        infra=_parsed(found, INFRA, _LARGEST, _Infra),
        latency=_parsed(found, LATENCY, _LARGEST, _Latency) or _Latency(),
        variants=_parsed(found, variants.FILE, variants.LARGEST, variants.Record)
        or variants.Record(),
    )


def _parsed(found: Sealed, name: str, limit: int, model: type[M]) -> M | None:
    content = found.read(name, limit)
    try:
        return None if content is None else model.model_validate_json(content)
    except ValidationError as error:
        raise InputError(
            f"{found.uri}/{name} cannot be judged: {first_fault(error)}; {found.advice}"
        ) from None


def bundle_checks(rules: Rules, bundle: Bundled) -> list[Check]:
    """The rules that look at the bundle; a process that answered wrongly always fails.

    Args:
        rules: All of them.
        bundle: What is judged.
    """
    return [
        *_serves(rules.must_serve, bundle.infra),
        *_latency(rules.max_latency_ms, rules.budget_of, bundle),
        *_memory(rules.max_memory_mb, rules.budget_of, bundle.infra),
        *_size(rules.max_bundle_mb, bundle.size),
        *_variants(rules, bundle.variants),
    ]


def _serves(must: bool, infra: _Infra | None) -> Iterator[Check]:
    rule = "must_serve"
    if infra is None or not infra.files:
        why = infra.reason if infra else "no process with the runtime alone was asked"
        if must:
            yield Check(rule, False, f"the bundle is not known to serve: {why}")
    elif infra.passed:
        yield Check(rule, True, f"the bundle serves: {', '.join(sorted(infra.files))}")
    else:
        yield Check(rule, False, f"the bundle does not serve: {infra.reason or 'it failed'}")


def _latency(bound: float, name: str, bundle: Bundled) -> Iterator[Check]:
    rule = "max_latency_ms"
    if not bound:
        return
    asked = bundle.infra.files.get(name) if bundle.infra else None
    times = asked.latency if asked and asked.latency else bundle.latency.runtimes.get(name, {})
    if _BATCH in times:
        what = f"milliseconds for one image by {name}"
        yield at_most(rule, what, times[_BATCH].median_ms, bound, decimals=2)
    else:
        yield _unmeasured(rule, "latency", name, bundle.latency.runtimes, bound)


def _memory(bound: float, name: str, infra: _Infra | None) -> Iterator[Check]:
    rule = "max_memory_mb"
    if not bound:
        return
    files = infra.files if infra else {}
    used = files[name].memory_mb if name in files else None
    if used is None:
        measured = {each: one for each, one in files.items() if one.memory_mb is not None}
        yield _unmeasured(rule, "memory", name, measured, bound)
    else:
        yield at_most(rule, f"MB of memory to serve {name}", used, bound, decimals=1)


def _unmeasured(rule: str, what: str, name: str, measured: Iterable[str], bound: float) -> Check:
    known = ", ".join(sorted(measured)) or "none"
    return Check(rule, False, f"no {what} of {name} was measured (known: {known})", None, bound)


def _size(bound: float, size: int) -> Iterator[Check]:
    if bound:
        yield at_most("max_bundle_mb", "MB of the bundle", size / 1e6, bound, decimals=1)


def _variants(rules: Rules, record: variants.Record) -> Iterator[Check]:
    """Each further form of the model, held against the rules for the model and those for it."""
    for name, why in record.left_out.items():
        yield Check("variants", True, f"variant {name} is left out: {why}")
    for rule in rules.need_bundle:
        if "variant" in rule and not record.variants:
            yield Check(rule, True, "the bundle has no variants")
    for one in record.variants:
        checks = own_checks(rules, one.evaluation.accuracy, one.evaluation)
        if rules.max_variant_loss < 1:
            what = "accuracy lost"
            checks.append(at_most("max_variant_loss", what, -one.gain, rules.max_variant_loss))
        if rules.min_variant_agreement > 0:
            what, bound = "agreement with the model", rules.min_variant_agreement
            checks.append(at_least("min_variant_agreement", what, one.agreement, bound))
        for check in checks:
            words = f"variant {one.name}: {check.words}"
            yield Check(check.rule, check.holds, words, check.value, check.bound)
