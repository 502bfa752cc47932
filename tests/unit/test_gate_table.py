"""The gate's truth table: what it says where a rule holds, fails, or lacks what it asks for.

The table in the gate's README is what these cases say; `python -m tests.unit.test_gate_table`
writes it anew.
"""

import json
import math
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
from tests.gating import CLASSES, FILES, bundled, evaluation, exported, hits, infra, judged, variant

README = CHECKOUT / "kfp_ddp" / "components" / "gate" / "README.md"
START, END = "<!-- truth table -->\n", "<!-- /truth table -->"
KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
PEM = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
NAME = "CHAMPION_PUB"
OTHERS = [CLASSES[0], CLASSES[1].model_copy(update={"recall": 0.6})]
SLOW = {"model.onnx": {"latency": {"batch_1": {"median_ms": 20.0}}, "memory_mb": 300.0}}
WRONG = {"passed": False, "reason": "model.onnx: differs from the checkpoint by 3, 1e-4 is allowed"}


class Given(NamedTuple):
    """What the gate is given; of 100 samples so many are wrong."""

    wrong: int = 3
    changed: Mapping[str, Any] = MappingProxyType({})
    """Fields of the evaluation."""
    connected: bool = True
    """Whether the evaluation is given."""
    champion: int | None = None
    """How many it has wrong; -1 for a place where there is none yet, None for no champion."""
    its: Mapping[str, Any] = MappingProxyType({})
    """Fields of its evaluation."""
    spoilt: str = ""
    """What is done to the champion, or the bundle."""
    bundle: dict[str, Any] | None = None
    """Its JSON files, None for no bundle; a number for `variants` is the accuracy gained."""


class Row(NamedTuple):
    """A rule, and what it is shown."""

    rule: str
    asked: dict[str, Any]
    holds: Given
    fails: Given
    unknown: Given | None = None
    """What it asks for is given, and does not tell."""
    missing: Given | None = None
    """What it asks for is not given."""
    checked: str = ""
    """The rule's name in the verdict, where it is another's."""


def sliced(correct: int, samples: int) -> Given:
    return Given(changed={"slices": [slice_of("weather", "fog", correct, samples)]})


def serving(files: dict[str, Any] = FILES, **more: Any) -> Given:
    return Given(bundle={"infra": infra(files=files), **more})


ALONE = Given(connected=False)
NOTHING = Given(bundle={})
ROWS = [
    Row("min_accuracy", {"min_accuracy": 0.95}, Given(), Given(8)),
    Row(
        "use_lower_bound", {"min_accuracy": 0.9, "use_lower_bound": True},
        Given(), Given(8), missing=ALONE, checked="min_accuracy",
    ),
    Row(
        "min_balanced_accuracy", {"min_balanced_accuracy": 0.8}, Given(),
        Given(changed={"classes": OTHERS}), Given(changed={"classes": []}), ALONE,
    ),
    Row(
        "min_class_recall", {"min_class_recall": 0.8}, Given(changed={"classes": CLASSES[:2]}),
        Given(changed={"classes": OTHERS}), Given(), ALONE,
    ),
    Row(
        "min_slice_accuracy", {"min_slice_accuracy": 0.9},
        sliced(46, 50), sliced(40, 50), Given(), ALONE,
    ),
    Row(
        "min_slice_samples", {"min_slice_accuracy": 0.9, "min_slice_samples": 10},
        sliced(19, 20), sliced(17, 20), sliced(9, 9), ALONE, "min_slice_accuracy",
    ),
    Row(
        "max_calibration_error", {"max_calibration_error": 0.05}, Given(),
        Given(changed={"calibration_error": 0.06}), None, ALONE,
    ),
    Row(
        "min_improvement", {"min_improvement": 0.01},
        Given(champion=5), Given(champion=3), Given(champion=-1), Given(),
    ),
    Row(
        "max_p_value", {"max_p_value": 0.05}, Given(champion=8), Given(champion=5),
        Given(champion=8, spoilt="no predictions"), Given(),
    ),
    Row(
        "champion_must_exist", {"champion_must_exist": True}, Given(champion=5),
        Given(champion=-1), None, Given(),
    ),
    Row(
        "champion_key", {"champion_key": NAME}, Given(champion=5, spoilt="signed"),
        Given(champion=5, spoilt="signed by another"), Given(champion=5), Given(),
    ),
    Row("max_latency_ms", {"max_latency_ms": 10}, serving(), serving(SLOW), NOTHING, Given()),
    Row(
        "budget_of", {"max_latency_ms": 3, "budget_of": "model.int8.onnx"}, serving(),
        serving({"model.int8.onnx": SLOW["model.onnx"]}), serving(SLOW), None, "max_latency_ms",
    ),
    Row(
        "max_bundle_mb", {"max_bundle_mb": 1}, Given(bundle={"megabytes": 0.5}),
        Given(bundle={"megabytes": 1.5}), None, Given(),
    ),
    Row("max_memory_mb", {"max_memory_mb": 200}, serving(), serving(SLOW), NOTHING, Given()),
    Row(
        "must_serve", {"must_serve": True}, serving(),
        Given(bundle={"infra": infra(**WRONG)}), NOTHING, Given(),
    ),
    Row(
        "max_variant_loss", {"max_variant_loss": 0.02}, Given(bundle={"variants": -0.01}),
        Given(bundle={"variants": -0.03}), NOTHING, Given(),
    ),
    Row(
        "min_variant_agreement", {"min_variant_agreement": 0.97},
        Given(bundle={"variants": -0.01}), Given(bundle={"variants": -0.02}), NOTHING, Given(),
    ),
]  # fmt: skip
ALWAYS = {
    "a process with only the runtime answers incorrectly": (
        Given(bundle={"infra": infra(**WRONG)}), {},
    ),
    "all samples are of a single class": (Given(changed={"classes": [CLASSES[0], CLASSES[2]]}), {}),
    "a variant is below a rule for the model": (
        Given(bundle={"variants": -0.02}), {"min_accuracy": 0.96},
    ),
    "the champion was evaluated on other samples": (
        Given(champion=5, its={"samples_digest": "0" * 64}), {},
    ),
    "the champion is not what its manifest lists": (Given(champion=5, spoilt="forged"), {}),
    "the bundle is not what its manifest lists": (Given(bundle={}, spoilt="forged"), {}),
    "the bundle is of another evaluation": (Given(bundle={}, spoilt="of another"), {}),
    "the evaluation has a number that is not finite": (Given(spoilt="not a number"), {}),
}  # fmt: skip


class Said(NamedTuple):
    """What came of it: holds, fails or error, and the words for that."""

    state: str
    words: str
    rules: set[str]
    """Those that fail."""


def say(root: Path, given: Given, asked: dict[str, Any], rule: str = "") -> Said:
    """What the gate says, with `…` for the folder that all lies in."""
    inputs: dict[str, Any] = dict(asked)
    run = evaluation(root / "run", hits(given.wrong), **given.changed)
    if given.connected:
        inputs["evaluation"] = run
    if given.champion is not None:
        inputs["champion"] = str(root / "models")
        (root / "models").mkdir()
        if given.champion >= 0:
            champion(root / "models", given)
    if given.bundle is not None:
        content = dict(given.bundle)
        if gain := content.pop("variants", 0):
            content["variants"] = variant(run, gain=gain, agreement=1 + 2 * gain)
        inputs["bundle"] = bundled(root / "run" / "bundle", run, **content)
    spoil(given.spoilt, root)
    try:
        blessed, reason = judged(root, 1 - given.wrong / 100, **inputs)
    except SystemExit as ended:
        assert not (root / "run" / VERDICT).exists()
        return Said("error", short(str(ended).removeprefix("error: "), root), set())
    if not given.connected:
        return Said("holds" if blessed else "fails", reason, set())
    checks = json.loads((root / "run" / VERDICT).read_text())["rules"]
    failing = {check["rule"] for check in checks if not check["holds"]}
    assert blessed == (not failing)
    told = [check for check in checks if check["holds"] == blessed]
    of_rule = [check["words"] for check in told if check["rule"] == rule]
    words = "; ".join(of_rule) or told[-1]["words"]
    return Said("holds" if blessed else "fails", short(words, root), failing)


def short(words: str, root: Path) -> str:
    """Words without what differs from run to run."""
    words = words.replace(str(root), "…")
    return re.sub(r"\b[0-9a-f]{12}\b", "…", words)


def champion(models: Path, given: Given) -> None:
    """Export a champion to a folder of models."""
    made = exported(models, given.champion or 0, **given.its)
    (models / "CHAMPION").write_text(made)


def spoil(how: str, root: Path) -> None:
    """Sign or damage what lies there."""
    pointer = root / "models" / "CHAMPION"
    folder = pointer.with_name(pointer.read_text()) if pointer.exists() else root
    match how:
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
            evaluation(root / "run", hits(3), loss=0.1)
        case "not a number":
            path = root / "run" / "evaluation.json"
            path.write_text(path.read_text().replace('"loss":0.3', '"loss":NaN'))


CASES = [
    pytest.param(row, column, id=f"{row.rule}-{column}")
    for row in ROWS
    for column in ("holds", "fails", "unknown", "missing")
    if getattr(row, column) is not None
]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public key, as a key of the bucket's secret is told."""
    monkeypatch.setenv(NAME, PEM.decode())


@pytest.mark.parametrize(("row", "column"), CASES)
def test_a_rule_holds_fails_or_says_what_it_lacks(row: Row, column: str, tmp_path: Path) -> None:
    said = say(tmp_path, getattr(row, column), row.asked, row.checked or row.rule)
    assert said.words
    assert "\n" not in said.words
    if column == "holds":
        assert said.state == "holds"
    elif column == "missing":
        assert said.state == "error"
        assert " is set but " in said.words
    elif said.state != "error":
        assert (said.state == "holds") == (not said.rules)
        assert said.rules <= {row.checked or row.rule}
    if column == "fails":
        assert said.state in ("fails", "error")


@pytest.mark.parametrize("what", ALWAYS)
def test_what_no_rule_asks_for_is_not_let_through_either(what: str, tmp_path: Path) -> None:
    assert say(tmp_path, *ALWAYS[what]).state in ("fails", "error")


def test_every_rule_is_in_the_table() -> None:
    assert [row.rule for row in ROWS] == list(Rules.model_fields)


def test_the_table_of_the_readme_is_what_the_gate_says() -> None:
    _, _, rest = README.read_text().partition(START)
    assert rest.partition(END)[0] == table(), "python -m tests.unit.test_gate_table writes it"


def test_a_key_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "no key")
    said = say(tmp_path, Given(champion=5), {"champion_key": NAME})
    assert said.state == "error"
    assert said.words.startswith(f"champion_key ({NAME}) is not a public key: ")


def test_an_accuracy_that_is_none_never_holds(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="accuracy is nan"):
        judged(tmp_path, math.nan, min_accuracy=0.5)


def table() -> str:
    """The table as the README has it."""
    lines = [
        "| Rule | Set | Holds | Fails | Not known | Not connected |",
        "|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        cells = [f"`{row.rule}`", f"`{json.dumps(row.asked)}`"]
        for name in ("holds", "fails", "unknown", "missing"):
            given = getattr(row, name)
            cells += [_words(given, row.asked, row.checked or row.rule, name) if given else ""]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| With any rules, if | | Message |", "|---|---|---|"]
    for what, (given, asked) in ALWAYS.items():
        with tempfile.TemporaryDirectory() as root:
            said = say(Path(root), given, asked)
        lines.append(f"| {what} | {STATES[said.state]} | {escaped(said.words)} |")
    return "\n".join(lines) + "\n"


STATES = {"holds": "holds", "fails": "not blessed", "error": "error"}


def _words(given: Given, asked: dict[str, Any], rule: str, column: str) -> str:
    with tempfile.TemporaryDirectory() as root:
        said = say(Path(root), given, asked, rule)
    expected = {"holds": "holds", "fails": "fails", "missing": "error"}.get(column)
    state = "" if said.state == expected else f"{STATES[said.state]}: "
    return state + escaped(said.words)


def escaped(words: str) -> str:
    """Words in a table of Markdown."""
    return words.replace("|", "\\|").replace("<", "\\<").replace("_", "\\_")


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NAME, PEM.decode())
        head, start, rest = README.read_text().partition(START)
        README.write_text(head + start + table() + END + rest.partition(END)[2])
