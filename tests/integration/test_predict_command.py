"""`kfp-ddp predict` on a sealed bundle, and `load` in Python."""

import codecs
import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kfp_ddp.cli.serve import UNSURE, _folder_names
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.models.evaluation import prediction_rows
from kfp_ddp.predict import load
from tests import photographs
from tests.commands import call, output
from tests.integration.serve.test_serve import sealed
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
