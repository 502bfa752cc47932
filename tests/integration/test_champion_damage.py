"""What is read of a champion is damaged, forged or endless: one line, or the same verdict."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from kfp import dsl

from kfp_ddp.components.gate.component import gate
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.models import bundle, champion
from kfp_ddp.models.champion import find
from kfp_ddp.models.evaluation import Evaluation
from tests.exports import SAMPLES, evaluated
from tests.generations import Bucket, handler
from tests.serving import serving

FILES = ("MANIFEST.sha256", "_SUCCESS", "metrics.json", "predictions.csv")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of exports whose champion has 50 of 60 right, and a challenger with 52."""
    root = tmp_path_factory.mktemp("whole")
    made = evaluated(root / "exports" / "made", "metrics.json", 10).parent
    (made / "model.safetensors").write_bytes(bytes(1000))
    made.rename(made.with_name(bundle.seal(made)[:12]))
    pointer = next((root / "exports").iterdir()).name
    (root / "exports" / "CHAMPION").write_text(f"{pointer}\n")
    evaluated(root / "run", "evaluation.json", 8)
    return root


def verdict(root: Path, place: str) -> str:
    """What the gate says: its reason, or the line that it ends with."""
    said = dsl.Markdown(name="verdict", uri=str(root / "verdict.md"))
    try:
        gate.python_func(
            accuracy=52 / 60,
            evaluation=str(root / "run" / "evaluation.json"),
            champion=place,
            gate_verdict=said,
            gate_report=dsl.HTML(name="report", uri=str(root / "report.html")),
            rules={"max_p_value": 1 - 1e-9},
        )
    except SystemExit as ended:
        found = str(ended)
    else:
        found = str(said.metadata["reason"])
        assert not found.startswith("error: ")
    assert "\n" not in found
    return found


def flipped(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]


DAMAGE: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flip": flipped,
    "cut": lambda content, draw: content[: draw.randrange(len(content))],
    "more": lambda content, draw: content + draw.randbytes(draw.randrange(1, 200)),
    "other": lambda content, draw: draw.randbytes(draw.randrange(300)),
    "swap": lambda content, draw: content.replace(b"cat", b"dog", draw.randrange(1, 90)),
    "twice": lambda content, _: content * 2,
    "nul": lambda content, _: content.replace(b"\n", b"\0"),
}


def damage(path: Path, draw: random.Random) -> str:
    kind = draw.choice([*DAMAGE, *DAMAGE, "gone", "link", "folder", "pipe"])
    content = path.read_bytes()
    path.unlink()
    match kind:
        case "link":
            path.with_name("elsewhere").write_bytes(content)
            path.symlink_to(path.with_name("elsewhere"))
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "gone":
            pass
        case _:
            path.write_bytes(DAMAGE[kind](content, draw))
    return kind


@pytest.mark.parametrize("by", ["pointer", "version"])
@pytest.mark.parametrize("seed", range(10))
def test_a_damaged_bundle_gives_one_line_or_the_same_verdict(
    whole: Path, tmp_path: Path, by: str, seed: int
) -> None:
    draw = random.Random(seed)
    exports = whole / "exports"
    version = (exports / "CHAMPION").read_text().strip()
    expected = verdict(whole, str(exports))
    assert "McNemar" in expected
    for number in range(40):
        root = tmp_path / str(number)
        shutil.copytree(whole, root)
        bundled = root / "exports" / version
        place = root / "exports" if by == "pointer" else bundled
        if by == "pointer" and draw.random() < 0.25:
            what = "CHAMPION " + damage(root / "exports" / "CHAMPION", draw)
        else:
            name = draw.choice(FILES)
            what = f"{name} {damage(bundled / name, draw)}"
        said = verdict(root, str(place))
        # A pointer that is gone is no pointer: then there is no champion yet.
        absent = what == "CHAMPION gone" and "there is no champion" in said
        # Without manifest and digest it is no bundle, but an evaluation that anybody may write.
        assert said == expected or said.startswith("error: ") or absent, what


FORGED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "worse": lambda record: record | {"correct": 1, "accuracy": 1 / SAMPLES},
    "other samples": lambda record: record | {"samples_digest": "0" * 64},
    "other file": lambda record: record | {"predictions": "_SUCCESS"},
}


@pytest.mark.parametrize("forged", list(FORGED))
@pytest.mark.parametrize("sealed", ["no", "manifest", "all", "manifest gone", "both gone"])
def test_a_forged_evaluation_is_not_believed(
    whole: Path, tmp_path: Path, forged: str, sealed: str
) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "exports" / (tmp_path / "exports" / "CHAMPION").read_text().strip()
    record = FORGED[forged](json.loads((folder / "metrics.json").read_text()))
    (folder / "metrics.json").write_text(json.dumps(record))
    success = (folder / "_SUCCESS").read_bytes()
    for own in ("MANIFEST.sha256", "_SUCCESS"):
        (folder / own).unlink()
    if sealed in ("manifest", "all"):
        bundle.seal(folder)
    if sealed != "all" and sealed != "both gone":
        (folder / "_SUCCESS").write_bytes(success)
    said = verdict(tmp_path, str(tmp_path / "exports"))
    assert said.startswith("error: ")
    assert "is damaged" in said or "does not exist" in said


@pytest.mark.parametrize("seed", range(10))
def test_an_evaluation_of_any_content_gives_one_line_or_a_verdict(
    whole: Path, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    junk: list[Any] = [
        *(None, True, -1, 0, 10**400, 1e308, -0.0, "", "\ud800", "x" * 10_000, [], {}, [[]]),
        *("../../etc/passwd", "/etc/passwd", "CHAMPION", "\x1b[2J", {"name": 1}, [None] * 100),
    ]
    source = (whole / "run" / "evaluation.json").read_text()
    target = tmp_path / "evaluation.json"
    for _ in range(40):
        record = json.loads(source)
        for _ in range(draw.randrange(1, 3)):
            name = draw.choice(list(record))
            record[name] = draw.choice(junk)
        target.write_text(json.dumps(record).replace("1e+308", draw.choice(["1e999", "NaN", "5"])))
        if draw.random() < 0.2:
            target.write_bytes(flipped(target.read_bytes(), draw))
        verdict(whole, str(target))
    target.write_text("[" * 100_000)
    assert verdict(whole, str(target)).startswith("error: ")


def test_files_that_are_too_large_are_refused(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(champion, "LARGEST", 1 << 20)
    monkeypatch.setattr(champion, "LARGEST_PREDICTIONS", 1 << 20)
    for name in FILES:
        root = tmp_path / name
        shutil.copytree(whole, root)
        file = root / "exports" / (root / "exports" / "CHAMPION").read_text().strip() / name
        with file.open("r+b") as opened:
            opened.truncate(1 << 40)
        assert "bytes, so it is not what export writes" in verdict(root, str(root / "exports"))
    with (whole / "run" / "evaluation.json").open("rb") as content:
        big = tmp_path / "big.json"
        big.write_bytes(content.read())
    os.truncate(big, 1 << 40)
    with pytest.raises(InputError, match="more than"):
        Evaluation.read(big)


@pytest.fixture
def served(whole: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """The exports in a bucket."""
    made = Bucket()
    for path in (whole / "exports").rglob("*"):
        if path.is_file():
            made.put(path.relative_to(whole).as_posix(), path.read_bytes())
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), handler(made))) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield made


def test_a_bucket_gives_the_verdict_of_the_folder(whole: Path, served: Bucket) -> None:
    assert verdict(whole, "gs://models/exports") == verdict(whole, str(whole / "exports"))


@pytest.mark.parametrize("told", ["its size", "a small size", "none"])
@pytest.mark.parametrize("name", ["CHAMPION", *FILES])
def test_a_server_that_sends_more_than_there_can_be_is_cut_off(
    whole: Path, served: Bucket, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    monkeypatch.setattr(champion, "LARGEST", 1 << 20)
    monkeypatch.setattr(champion, "LARGEST_PREDICTIONS", 1 << 20)
    (served.endless,) = (one for one in served.objects if one.endswith(f"/{name}"))
    served.endless_told = told
    said = verdict(whole, "gs://models/exports")
    if told == "a small size":  # the client reads no further than that
        assert said == verdict(whole, str(whole / "exports"))
    else:
        assert "bytes, so it is not what export writes" in said
    assert served.sent < 1 << 24


def test_a_transfer_that_is_damaged_is_not_believed(whole: Path, served: Bucket) -> None:
    (served.garbled,) = (one for one in served.objects if one.endswith("/CHAMPION"))
    with pytest.raises(StorageError, match="damaged"):
        find("gs://models/exports")
