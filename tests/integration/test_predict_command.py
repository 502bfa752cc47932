"""`kfp-ddp predict` on a sealed bundle, `load` in Python, and `kfp-ddp tensorboard`."""

import codecs
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kfp_ddp.cli.serve import UNSURE, _folder_names
from kfp_ddp.client.run.run_files import StoredFiles
from kfp_ddp.client.tensorboard import LogDir, fetch_metrics
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.models.evaluation import prediction_rows
from kfp_ddp.predict import load
from tests import photographs
from tests.commands import call, output, refused
from tests.integration.serve.test_serve import sealed
from tests.kfp_server.server import KfpServer
from tests.tolerance import near

__all__ = ["sealed"]


def copied(file: Path, target: Path) -> Path:
    target.parent.mkdir()
    return Path(shutil.copy(file, target))


def test_pictures_are_listed_sorted_and_explained(
    sealed: Path, trained_dataset: Path, tmp_path: Path
) -> None:
    long = tmp_path / "pictures" / ("long " * 20).strip()
    one, two = sorted(photographs.write(long, 2, ["a"]).rglob("*.jpg"))
    for system in ("@eaDir/IMG.jpg", "#recycle", "__MACOSX", ".Trash-1000/files", "a/.thumbnails"):
        photographs.write(long / system, 1, ["made"])
    evaluated = prediction_rows((sealed / "predictions.csv").read_bytes())
    least = min(evaluated, key=lambda row: float(row["confidence"]))["path"]
    other = copied(trained_dataset / "val" / least, tmp_path / "other" / one.name)
    broken = tmp_path / "broken.jpg"
    broken.write_text("hello")
    table, into, explained = (tmp_path / name for name in ("table.csv", "sorted", "explained"))
    words = ["predict", sealed, long, other, broken, "--top", 2, "--csv", table, "--into", into]
    words += ["--explain", explained]
    for json_ in ([], ["--json"]):
        done = call(*words, *json_)
        assert str(done.exception) == "1 of 4 pictures cannot be read"
        if not json_:
            assert not {str(one), str(two)} & set(done.stdout.split())
            assert f"wrote {table}, 4 rows" in done.stdout.splitlines()
            assert sum(map(int, re.findall(r"(?m)^ +(\d+)  ", done.stdout))) == 4
            assert re.search(r"(?m)^ +1  cannot be read$", done.stdout)
    answers = json.loads(done.stdout)["pictures"]
    assert answers[2]["sure"] is False
    unsure = sum(one.get("sure") is False for one in answers)
    assert f"unsure: {unsure} of 4 " in call(*words).stdout
    assert table.read_bytes().startswith(codecs.BOM_UTF8 + b'"picture"')
    rows = list(csv.DictReader(table.read_text(encoding="utf-8-sig").splitlines()))
    for row, answer, path in zip(rows, answers, (one, two, other, broken), strict=True):
        classes = answer.get("classes", [{"class": "", "probability": ""}] * 2)
        assert row["picture"] == answer["picture"] == str(path)
        assert [row["class 1"], row["class 2"]] == [each["class"] for each in classes]
        short = [str(round(each["probability"], 4)) for each in classes if each["probability"]]
        assert [row["probability 1"], row["probability 2"]] == (short or ["", ""])
        assert row["error"] == answer.get("error", "")
        assert row["sure"] == {True: "yes", False: "no", None: ""}[answer.get("sure")]
    copies = {path.relative_to(into).as_posix() for path in into.rglob("*.jpg")}
    assert f"{UNSURE}/{one.name}" in copies
    assert len(copies) == 9  # three times, and nothing is overwritten
    if rows[0]["sure"] == "yes":
        assert f"{rows[0]['class 1']}/{one.name}" in copies
    assert len(list(explained.glob("*.png"))) == 9
    with Image.open(one) as photograph, Image.open(explained / f"{one.stem}.png") as picture:
        assert max(picture.size) == max(480, *photograph.size)
        assert picture.width * photograph.height == picture.height * photograph.width


def test_output_that_nobody_reads_to_its_end_is_no_error(sealed: Path, tmp_path: Path) -> None:
    """As of `| head -1`."""
    pictures = photographs.write(tmp_path, 1, ["a"])
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-m", "kfp_ddp", "predict", str(sealed), str(pictures)]
    done = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert done.stderr == b""


def test_links_and_formulas(sealed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = next(photographs.write(tmp_path / "a", 1, ["a"]).rglob("*.jpg"))
    one.rename("=1+1.jpg")
    for name in (UNSURE, *json.loads((sealed / "classes.json").read_text())):
        Path("sorted", name).mkdir(parents=True)
        Path("sorted", name, "=1+1.jpg").symlink_to(tmp_path / "outside")
    words = ["predict", sealed, "=1+1.jpg", "--into", "sorted", "--csv"]
    output(*words, "table.csv")
    assert Path("table.csv").read_text().splitlines()[1].startswith('"\'=1+1.jpg",')
    assert isinstance(call(*words, "none/table").exception, StorageError)
    assert not Path("outside").exists()
    assert len(list(Path("sorted").rglob("=1+1-2.jpg"))) == 1


def test_each_class_has_a_folder_of_its_own() -> None:
    names = _folder_names(["tulip", "😀", "😁", "../x", "A", "a", "_Unsure"])
    assert list(names.values()) == ["tulip", "_-1", "_-2", "__x", "A-4", "a-5", "_Unsure-6"]


def test_python_takes_paths_contents_pictures_and_arrays(sealed: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    model = load(str(sealed))
    shares = model([path, str(path), path.read_bytes(), Image.open(path), pixels])
    assert shares == near(np.tile(shares[0], (5, 1)))
    heat = model.saliency(model.square(path), 0)
    assert heat.shape == (16, 16)
    assert (heat.min() >= 0, heat.max()) == (True, 1)
    damaged = Path(shutil.copytree(sealed, tmp_path / "damaged"))
    with (damaged / "model.onnx").open("ab") as file:
        file.write(b"x")
    with pytest.raises(InputError, match=r"is damaged: model\.onnx is not"):
        load(str(damaged))


def events(folder: Path, *lines: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"time": 1000.0 + i, **e}) + "\n" for i, e in enumerate(lines))
    return folder


def step(number: int, loss: float | None) -> dict[str, Any]:
    return {"event": "step", "step": number, "loss": loss, "rank_seconds": [0.1]}


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard reads there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return [(one.step, round(one.value, 3)) for one in events.Scalars(tag)]


def test_curves_grow_and_what_a_resume_does_again_counts_once(tmp_path: Path) -> None:
    run = events(tmp_path / "run", {"event": "start", "resumed_from_step": 0}, step(1, 3.0))
    process = LogDir(tmp_path / "process")
    process.update("run", run)
    assert scalars(tmp_path / "process/run", "step/loss") == [(1, 3.0)]
    events(run, step(2, 2.5), step(3, 2.0), step(4, None))
    half = (run / "metrics.jsonl").read_text() + '{"event": "step", "st'
    (run / "metrics.jsonl").write_text(half)
    process.update("run", run)
    assert scalars(tmp_path / "process/run", "step/loss") == [(1, 3.0), (2, 2.5), (3, 2.0)]
    whole = (run / "metrics.jsonl").read_text().rpartition("\n")[0] + "\n"
    (run / "metrics.jsonl").write_text(whole)
    events(run, {"event": "start", "resumed_from_step": 2}, step(3, 1.9))
    events(run, {"event": "eval", "step": 3, "epoch": 1, "accuracy": 0.9})
    process.update("run", run)
    assert scalars(tmp_path / "process/run", "step/loss") == [(1, 3.0), (2, 2.5), (3, 1.9)]
    assert scalars(tmp_path / "process/run", "eval/accuracy") == [(3, 0.9)]


def test_of_a_run_come_its_metrics_and_the_events_of_scripts_of_ones_own(tmp_path: Path) -> None:
    run = tmp_path / "runs/1f0c"
    events(run / "train", step(1, 3.0))
    for task in ("train", "mine"):
        (run / task / "tensorboard").mkdir(parents=True)
        (run / task / "tensorboard/events.out.tfevents.1").write_bytes(b"")
        (run / task / "checkpoint.pt").write_bytes(b"large")
    fetch_metrics(StoredFiles(str(run)), tmp_path / "brought")
    files = {p.relative_to(tmp_path / "brought") for p in (tmp_path / "brought").rglob("*.*")}
    assert set(map(str, files)) == {
        "train/metrics.jsonl", "mine/tensorboard/events.out.tfevents.1"
    }  # fmt: skip
    LogDir(tmp_path / "process").update("1f0c", tmp_path / "brought")
    assert (tmp_path / "process/1f0c/mine-tensorboard").is_symlink()


@pytest.mark.parametrize(
    ("words", "why"),
    [(["{}"], "there are no metrics"), (["{}/none"], "not found: give one of run --local")],
)
def test_a_folder_that_is_no_run_is_refused(words: list[str], why: str, tmp_path: Path) -> None:
    assert why in refused("tensorboard", *(word.format(tmp_path) for word in words))


def test_a_folder_and_a_run_of_kfp_until_ctrl_c(tmp_path: Path, kfp_server: KfpServer) -> None:
    run_id = "8fa2b9a1-6d87-4473-ad43-69c2efa3bcc0"
    for name in ("photos/work/1f0c", f"runs/{run_id}"):
        events(tmp_path / name / "train", step(1, 3.0))
    given = {"parameters": {"work": f"file://{tmp_path}/runs"}}
    kfp_server.record("run_get_failed", runtime_config=given)
    words = [str(tmp_path / "photos"), "last", "--host", kfp_server.url]
    command = [sys.executable, "-m", "kfp_ddp", "tensorboard", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            address = re.match(r"(http://127\.0\.0\.1:\d+) ", line)
            assert address, line
            with urllib.request.urlopen(f"{address[1]}/data/runs", timeout=60) as answer:
                assert sorted(json.load(answer)) == ["photos", "shapes-1 8fa2b9a1"]
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address[1], timeout=5)
