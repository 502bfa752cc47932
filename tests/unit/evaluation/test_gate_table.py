"""The truth table of the gate: each rule holds, fails, or lacks an input.

These cases are the table in the gate's README, which
`python -m tests.unit.evaluation.test_gate_table` writes.
"""

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from kfp_ddp.core.run_folder import VERDICT
from kfp_ddp.evaluation.gate.rules import Rules
from kfp_ddp.models import signature
from kfp_ddp.models.evaluation import slice_of
from tests.conftest import CHECKOUT
from tests.gating import CLASSES, FILES, bundled, evaluation, exported, infra, judged, variant

README = CHECKOUT / "kfp_ddp" / "components" / "gate" / "README.md"
START, END = "<!-- truth table -->\n", "<!-- /truth table -->"
KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
PEM = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
NAME = "CHAMPION_PUB"
OTHERS = [CLASSES[0], CLASSES[1].model_copy(update={"recall": 0.6})]
SLOW = {"model.onnx": {"latency": {"batch_1": {"median_ms": 20.0}}, "memory_mb": 300.0}}
WRONG = {"passed": False, "reason": "model.onnx: differs from the checkpoint by 3, 1e-4 is allowed"}


class Inputs(NamedTuple):
    """Inputs of the gate; `wrong` of 100 samples are incorrect."""

    wrong: int = 3
    changed: Mapping[str, Any] = MappingProxyType({})
    """Fields of the evaluation."""
    connected: bool = True
    """Whether evaluation is connected."""
    champion: int | None = None
    """Its incorrect samples; -1 for an empty folder, None for no champion."""
    champion_fields: Mapping[str, Any] = MappingProxyType({})
    """Fields of its evaluation."""
    damage: str = ""
    """How champion or bundle are damaged or signed."""
    bundle: dict[str, Any] | None = None
    """Its JSON files, None for no bundle; a number for `variants` is the accuracy gained."""


class Row(NamedTuple):
    """A rule and its cases."""

    rule: str
    rules: dict[str, Any]
    holds: Inputs
    fails: Inputs
    unknown: Inputs | None = None
    """The input has no value for the rule."""
    missing: Inputs | None = None
    """The input is not connected."""
    checked: str = ""
    """Name of the rule in the verdict, if different."""


def sliced(correct: int, samples: int) -> Inputs:
    return Inputs(changed={"slices": [slice_of("weather", "fog", correct, samples)]})


def serving(files: dict[str, Any] = FILES, **more: Any) -> Inputs:
    return Inputs(bundle={"infra": infra(files=files), **more})


ALONE = Inputs(connected=False)
NOTHING = Inputs(bundle={})
ROWS = [
    Row("min_accuracy", {"min_accuracy": 0.95}, Inputs(), Inputs(8)),
    Row(
        "use_lower_bound", {"min_accuracy": 0.9, "use_lower_bound": True},
        Inputs(), Inputs(8), missing=ALONE, checked="min_accuracy",
    ),
    Row(
        "min_balanced_accuracy", {"min_accuracy": 0, "min_balanced_accuracy": 0.8}, Inputs(),
        Inputs(changed={"classes": OTHERS}), Inputs(changed={"classes": []}), ALONE,
    ),
    Row(
        "min_class_recall", {"min_class_recall": 0.8}, Inputs(changed={"classes": CLASSES[:2]}),
        Inputs(changed={"classes": OTHERS}), Inputs(), ALONE,
    ),
    Row(
        "min_slice_accuracy", {"min_slice_accuracy": 0.9},
        sliced(46, 50), sliced(40, 50), Inputs(), ALONE,
    ),
    Row(
        "min_slice_samples", {"min_slice_accuracy": 0.9, "min_slice_samples": 10},
        sliced(19, 20), sliced(17, 20), sliced(9, 9), ALONE, "min_slice_accuracy",
    ),
    Row(
        "max_calibration_error", {"max_calibration_error": 0.05}, Inputs(),
        Inputs(changed={"calibration_error": 0.06}), None, ALONE,
    ),
    Row(
        "min_improvement", {"min_improvement": 0.01},
        Inputs(champion=5), Inputs(champion=3), Inputs(champion=-1), Inputs(),
    ),
    Row(
        "max_p_value", {"max_p_value": 0.05}, Inputs(champion=8), Inputs(champion=5),
        Inputs(champion=8, damage="no predictions"), Inputs(),
    ),
    Row(
        "champion_must_exist", {"champion_must_exist": True}, Inputs(champion=5),
        Inputs(champion=-1), None, Inputs(),
    ),
    Row(
        "champion_key", {"champion_key": NAME}, Inputs(champion=5, damage="signed"),
        Inputs(champion=5, damage="signed by another"), Inputs(champion=5), Inputs(),
    ),
    Row("max_latency_ms", {"max_latency_ms": 10}, serving(), serving(SLOW), NOTHING, Inputs()),
    Row(
        "budget_of", {"max_latency_ms": 3, "budget_of": "model.int8.onnx"}, serving(),
        serving({"model.int8.onnx": SLOW["model.onnx"]}), serving(SLOW), None, "max_latency_ms",
    ),
    Row(
        "max_bundle_mb", {"max_bundle_mb": 1}, Inputs(bundle={"megabytes": 0.5}),
        Inputs(bundle={"megabytes": 1.5}), None, Inputs(),
    ),
    Row("max_memory_mb", {"max_memory_mb": 200}, serving(), serving(SLOW), NOTHING, Inputs()),
    Row(
        "must_serve", {"must_serve": True}, serving(),
        Inputs(bundle={"infra": infra(**WRONG)}), NOTHING, Inputs(),
    ),
    Row(
        "max_variant_loss", {"max_variant_loss": 0.02}, Inputs(bundle={"variants": -0.01}),
        Inputs(bundle={"variants": -0.03}), NOTHING, Inputs(),
    ),
    Row(
        "min_variant_agreement", {"min_variant_agreement": 0.97},
        Inputs(bundle={"variants": -0.01}), Inputs(bundle={"variants": -0.02}), NOTHING, Inputs(),
    ),
]  # fmt: skip
ALWAYS = {
    "without `min_accuracy`: no better than the largest class": (Inputs(71), {}),
    "without `min_accuracy`: better, but by too few samples": (
        Inputs(47, {"classes": [CLASSES[0].model_copy(update={"recall": 0.5})]}), {},
    ),
    "a process answers incorrectly": (
        Inputs(bundle={"infra": infra(**WRONG)}), {},
    ),
    "all samples are of one class": (Inputs(changed={"classes": [CLASSES[0], CLASSES[2]]}), {}),
    "a variant is below a rule for the model": (
        Inputs(bundle={"variants": -0.02}), {"min_accuracy": 0.96},
    ),
    "the champion was evaluated on other samples": (
        Inputs(champion=5, champion_fields={"samples_digest": "0" * 64}), {},
    ),
    "the champion is not what its manifest lists": (Inputs(champion=5, damage="forged"), {}),
    "the bundle is not what its manifest lists": (Inputs(bundle={}, damage="forged"), {}),
    "the bundle is of another evaluation": (Inputs(bundle={}, damage="of another"), {}),
    "the evaluation has a number that is not finite": (Inputs(damage="not a number"), {}),
}  # fmt: skip


class Result(NamedTuple):
    """Result: holds, fails or error, and its message."""

    state: str
    words: str
    rules: set[str]
    """The failed rules."""


def run_gate(root: Path, case: Inputs, rules: dict[str, Any], rule: str = "") -> Result:
    """Run the gate; `…` replaces the folder in the message."""
    inputs: dict[str, Any] = dict(rules)
    run = evaluation(root / "run", case.wrong, **case.changed)
    if case.connected:
        inputs["evaluation"] = run
    if case.champion is not None:
        inputs["champion"] = str(root / "models")
        (root / "models").mkdir()
        if case.champion >= 0:
            champion(root / "models", case)
    if case.bundle is not None:
        content = dict(case.bundle)
        if gain := content.pop("variants", 0):
            content["variants"] = variant(run, gain=gain, agreement=1 + 2 * gain)
        inputs["bundle"] = bundled(root / "run" / "bundle", run, **content)
    damage(case.damage, root)
    try:
        blessed, reason = judged(root, 1 - case.wrong / 100, **inputs)
    except SystemExit as ended:
        assert not (root / "run" / VERDICT).exists()
        return Result("error", short(str(ended).removeprefix("error: "), root), set())
    if not case.connected:
        return Result("holds" if blessed else "fails", reason, set())
    checks = json.loads((root / "run" / VERDICT).read_text())["rules"]
    failing = {check["rule"] for check in checks if not check["holds"]}
    assert blessed == (not failing)
    decisive = [check for check in checks if check["holds"] == blessed]
    of_rule = [check["words"] for check in decisive if check["rule"] == rule]
    words = "; ".join(of_rule) or decisive[-1]["words"]
    return Result("holds" if blessed else "fails", short(words, root), failing)


def short(words: str, root: Path) -> str:
    """Return a message without parts that differ between runs."""
    words = words.replace(str(root), "…")
    return re.sub(r"\b[0-9a-f]{12}\b", "…", words)


def champion(models: Path, case: Inputs) -> None:
    """Export a champion to a folder of models."""
    made = exported(models, case.champion or 0, **case.champion_fields)
    (models / "CHAMPION").write_text(made)


def damage(kind: str, root: Path) -> None:
    """Sign or damage champion or bundle."""
    pointer = root / "models" / "CHAMPION"
    folder = pointer.with_name(pointer.read_text()) if pointer.exists() else root
    match kind:
        case "signed":
            signature.sign(folder, KEY)
        case "signed by another":
            signature.sign(folder, Ed25519PrivateKey.from_private_bytes(b"o" * 32))
        case "no predictions":
            (folder / "predictions.csv").unlink()
        case "forged":
            for path in root.rglob("metrics.json"):
                path.write_text(path.read_text().replace('"correct":', '"correct": '))
        case "of another":
            evaluation(root / "run", 3, loss=0.1)
        case "not a number":
            path = root / "run" / "evaluation.json"
            path.write_text(path.read_text().replace('"loss":0.5', '"loss":NaN'))


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the public key as a key of the bucket's secret."""
    monkeypatch.setenv(NAME, PEM.decode())


def test_the_readme_has_the_table_of_all_rules() -> None:
    assert [row.rule for row in ROWS] == list(Rules.model_fields)
    _, _, rest = README.read_text().partition(START)
    assert rest.partition(END)[0] == table(), (
        "python -m tests.unit.evaluation.test_gate_table writes it"
    )


def test_an_invalid_key_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "no key")
    result = run_gate(tmp_path, Inputs(champion=5), {"champion_key": NAME})
    assert result.state == "error"
    assert result.words.startswith(f"champion_key ({NAME}) is not a public key: ")


def table() -> str:
    """Return the table of the README; it runs the gate for each case."""
    lines = [
        "| Rule | Set | Holds | Fails | Not known | Not connected |",
        "|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        cells = [f"`{row.rule}`", f"`{json.dumps(row.rules)}`"]
        for name in ("holds", "fails", "unknown", "missing"):
            case = getattr(row, name)
            cells += [_words(case, row.rules, row.checked or row.rule, name) if case else ""]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| With any rules, if | | Message |", "|---|---|---|"]
    for title, (case, rules) in ALWAYS.items():
        with tempfile.TemporaryDirectory() as root:
            result = run_gate(Path(root), case, rules)
        assert result.state in ("fails", "error"), title
        lines.append(f"| {title} | {STATES[result.state]} | {escaped(result.words)} |")
    return "\n".join(lines) + "\n"


STATES = {"holds": "holds", "fails": "not blessed", "error": "error"}


def _words(case: Inputs, rules: dict[str, Any], rule: str, column: str) -> str:
    with tempfile.TemporaryDirectory() as root:
        result = run_gate(Path(root), case, rules, rule)
    allowed = {"holds": ["holds"], "fails": ["fails", "error"], "missing": ["error"]}
    assert result.state in allowed.get(column, STATES), (rule, column)
    assert result.rules <= {rule}
    expected = allowed.get(column, [""])[0]
    state = "" if result.state == expected else f"{STATES[result.state]}: "
    return state + escaped(result.words)


def escaped(words: str) -> str:
    """Escape a message for a Markdown table."""
    return words.replace("|", "\\|").replace("<", "\\<").replace("_", "\\_")


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NAME, PEM.decode())
        head, start, rest = README.read_text().partition(START)
        README.write_text(head + start + table() + END + rest.partition(END)[2])
