"""Records of earlier trainings, the step that looks for changes, and deletion of old bundles."""

from pathlib import Path
from typing import Any

import pytest
from kfp import dsl

from kfp_ddp.components.changes.component import changes
from kfp_ddp.models import attempts
from kfp_ddp.models.attempts import fingerprint, note, prune, unchanged
from kfp_ddp.models.champion import move
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store
from tests.files import write
from tests.gating import judged
from tests.run_output import evaluation


@pytest.fixture
def models(tmp_path: Path) -> Store:
    """The folder of a model's exports."""
    return open_store(str(tmp_path / "models" / "cats"))


def version(number: int) -> str:
    return f"{number:012x}"


def exported(where: Store, tmp_path: Path, number: int, champion: str = "") -> None:
    """Write the bundle of an attempt, and make it the champion."""
    for name in ("_SUCCESS", "model.onnx", "serving/1/model.onnx"):
        (tmp_path / "file").write_text(name)
        where.put(tmp_path / "file", f"{version(number)}/{name}")
    where.update("CHAMPION", lambda _: f"{version(number)}\n".encode())
    note(where, str(number), version=version(number), champion=champion, reason="blessed")


def versions(where: Store) -> set[str]:
    names = [name for name, _ in where.list("")]
    return {name.partition("/")[0] for name in names} - {"CHAMPION", attempts.FOLDER}


def test_order_and_number_types_do_not_change_the_fingerprint() -> None:
    one = fingerprint("abc", {"epochs": 3, "layers": {"a": [1, 0.5]}}, {}, "")
    assert one == fingerprint("abc", {"layers": {"a": [1.0, 0.5]}, "epochs": 3.0}, {}, "")
    assert len(one) == 16


def test_an_exported_attempt_lasts_as_its_bundle(models: Store, tmp_path: Path) -> None:
    assert unchanged(models, "1") is None
    exported(models, tmp_path, 1)
    attempt = unchanged(models, "1")
    assert attempt is not None
    assert attempt.summary.startswith(f"exported as {version(1)} (")
    exported(models, tmp_path, 2)
    assert unchanged(models, "1"), "also with another champion"
    models.delete(f"{version(1)}/_SUCCESS")
    assert unchanged(models, "1") is None


def test_an_attempt_not_blessed_is_of_its_champion(models: Store, tmp_path: Path) -> None:
    exported(models, tmp_path, 1)
    note(models, "a", version="", champion=version(1), reason="not blessed: too weak")
    attempt = unchanged(models, "a")
    assert attempt is not None
    assert attempt.summary.startswith("not blessed: too weak (")
    exported(models, tmp_path, 2)
    assert unchanged(models, "a") is None


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": 2}', b"\xff"])
def test_an_invalid_record_is_ignored(models: Store, content: bytes) -> None:
    models.update(f"{attempts.FOLDER}/1.json", lambda _: content)
    assert unchanged(models, "1") is None


def test_the_newest_bundles_the_champion_and_its_predecessor_remain(
    models: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 7):
        monkeypatch.setattr("time.time", lambda number=number: float(number))
        exported(models, tmp_path, number, champion=version(number - 1) if number > 1 else "")
    models.update("CHAMPION", lambda _: f"{version(3)}\n".encode())
    folder = tmp_path / "models" / "cats"
    (folder / version(1) / f".{'0' * 16}.tmp").write_text("half")
    (folder / attempts.FOLDER / ".4.json.tmp").write_text("half")
    assert set(prune(models, 2)) == {version(1), version(4)}
    assert versions(models) == {version(number) for number in (2, 3, 5, 6)}
    remaining = {path.name for path in folder.rglob("*")}
    assert not {version(1), version(4), ".1.json.lock", ".4.json.lock", ".4.json.tmp"} & remaining
    assert unchanged(models, "4") is None
    assert prune(models, 2) == []


def test_versions_in_service_remain(models: Store, tmp_path: Path) -> None:
    for number in (1, 2, 3, 4):
        exported(models, tmp_path, number, champion=version(number - 1))
    assert prune(models, 1, {version(1)}) == [version(2)]
    assert prune(models, 1) == [version(1)]


def test_the_version_that_a_promoted_one_replaced_remains(models: Store, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        exported(models, tmp_path, number)
    above = open_store(str(tmp_path / "models"))
    move(above, "cats", version(1), version(3))
    move(above, "cats", version(2), version(1), "promote")
    assert prune(models, 1) == []


def test_bundles_without_a_record_remain(models: Store, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        exported(models, tmp_path, number)
    models.delete(f"{attempts.FOLDER}/1.json")
    assert prune(models, 1) == [version(2)]
    assert versions(models) == {version(1), version(3)}


def test_as_many_records_of_models_that_were_not_blessed_remain(models: Store) -> None:
    for number in range(4):
        note(models, str(number), version="", champion="", reason="not blessed")
    assert prune(models, 2) == []
    assert len(list(models.list(f"{attempts.FOLDER}/"))) == 2


@pytest.mark.parametrize("letter", ["x", "\x01", "🦊", '"', "\u202e"])
def test_a_long_reason_is_cut_so_that_it_can_be_read(models: Store, letter: str) -> None:
    note(models, "1", version="", champion=version(1), reason=letter * 100_000)
    models.update("CHAMPION", lambda _: f"{version(1)}\n".encode())
    assert unchanged(models, "1") is not None


def asked(tmp_path: Path, **given: Any) -> tuple[bool, str, dsl.Markdown]:
    summary = dsl.Markdown(name="change_summary", uri=str(tmp_path / "summary.md"))
    inputs = {"digest": "d" * 64, "destination": str(tmp_path), "model_name": "cats"}
    changed, attempt = changes.python_func(change_summary=summary, **{**inputs, **given})
    return changed, attempt, summary


def test_what_was_tried_is_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed, attempt, summary = asked(tmp_path, training={"epochs": 3}, job={"nodes": 1})
    assert (changed, summary.metadata["changed"]) == (True, True)
    where = open_store(f"{tmp_path}/cats")
    attempts.note(where, attempt, version="", champion="", reason="not blessed: too weak")

    again, same, summary = asked(tmp_path, training={"epochs": 3}, job={"nodes": 2})
    assert (again, same) == (False, attempt)
    reason = "nothing new: dataset dddddddddddd was trained on with the same settings: not blessed"
    assert summary.metadata["reason"].startswith(reason)
    assert reason in capsys.readouterr().out
    assert "seed" in Path(summary.path).read_text()

    assert asked(tmp_path, training={"epochs": 3}, job={"image": "mine:2"})[0]
    assert asked(tmp_path, training={"epochs": 3}, digest="e" * 64)[0]
    assert asked(tmp_path, training={"epochs": 4})[0]
    assert asked(tmp_path, training={"epochs": 3}, gate={"min_accuracy": 0.5})[0]


@pytest.mark.parametrize("least", [0.4, 0.6])
def test_the_gate_notes_only_what_it_does_not_bless(least: float, tmp_path: Path) -> None:
    _, attempt, _ = asked(tmp_path)
    record = write(tmp_path / "run" / "evaluation.json", evaluation(50).model_dump_json())
    inputs = {"evaluation": str(record), "champion": str(tmp_path / "cats"), "attempt": attempt}
    blessed, _ = judged(tmp_path, 0.5, **inputs, min_accuracy=least)
    again, _, summary = asked(tmp_path)
    assert again is blessed is (least < 0.5)
    assert ("accuracy 0.5000 < 0.6" in summary.metadata["reason"]) is not blessed


@pytest.mark.parametrize(
    ("given", "line"),
    [({"destination": ""}, "destination is empty"), ({"model_name": "a/b"}, "model_name")],
)
def test_what_cannot_be_used_is_one_line(given: dict[str, str], line: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"^error: {line}"):
        asked(tmp_path, **given)
