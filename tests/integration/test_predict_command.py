"""`kfp-ddp predict` on a sealed bundle, and `load` in Python."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from kfp_ddp.cli import app
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.predict import load
from tests import photographs
from tests.integration.test_serve import sealed

__all__ = ["sealed"]


def test_pictures_are_listed_sorted_and_explained(sealed: Path, tmp_path: Path) -> None:
    long = tmp_path / "pictures" / ("long " * 20).strip()
    one, two = sorted(photographs.write(long, 2, ["a"]).rglob("*.jpg"))
    other = photographs.write(tmp_path / "other", 1, ["a"]) / "a" / one.name
    broken = tmp_path / "broken.jpg"
    broken.write_text("hello")
    table, into, explained = (tmp_path / name for name in ("table.csv", "sorted", "explained"))
    words = ["predict", sealed, long, other, broken, "--top", 2, "--csv", table, "--into", into]
    words += ["--explain", explained]
    for json_ in ([], ["--json"]):
        done = CliRunner().invoke(app, [*map(str, words), *json_])
        assert str(done.exception) == "1 of 4 pictures cannot be read"
    answers = json.loads(done.stdout)["pictures"]
    rows = list(csv.DictReader(table.read_text(encoding="utf-8").splitlines()))
    for row, answer, path in zip(rows, answers, (one, two, other, broken), strict=True):
        classes = answer.get("classes", [{"class": "", "probability": ""}] * 2)
        assert row["picture"] == answer["picture"] == str(path)
        assert [row["class 1"], row["class 2"]] == [each["class"] for each in classes]
        assert row["probability 1"] == str(classes[0]["probability"])
        assert row["error"] == answer.get("error", "")
    copies = {path.relative_to(into).as_posix() for path in into.rglob("*.jpg")}
    assert len(copies) == 6  # twice, and nothing is overwritten
    assert {f"{rows[0]['class 1']}/{name}.jpg" for name in (one.stem, f"{one.stem}-2")} <= copies
    assert len(list(explained.glob("*.png"))) == 6
    with Image.open(explained / f"{one.stem}.png") as picture:
        assert picture.size == (16, 16)


def test_no_link_is_followed_and_no_table_has_a_formula(
    sealed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one = next(photographs.write(tmp_path / "a", 1, ["a"]).rglob("*.jpg"))
    one.rename("=1+1.jpg")
    for name in json.loads((sealed / "classes.json").read_text()):
        Path("sorted", name).mkdir(parents=True)
        Path("sorted", name, "=1+1.jpg").symlink_to(tmp_path / "outside")
    words = ["predict", str(sealed), "=1+1.jpg", "--into", "sorted", "--csv"]
    assert CliRunner().invoke(app, [*words, "table.csv"]).exit_code == 0
    assert Path("table.csv").read_text().splitlines()[1].startswith("'=1+1.jpg,")
    assert isinstance(CliRunner().invoke(app, [*words, "none/table"]).exception, StorageError)
    assert not Path("outside").exists()
    assert len(list(Path("sorted").rglob("=1+1-2.jpg"))) == 1


def test_python_takes_paths_contents_pictures_and_arrays(sealed: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    model = load(str(sealed))
    shares = model([path, str(path), path.read_bytes(), Image.open(path), pixels])
    assert (shares == shares[0]).all()
    heat = model.saliency(model.square(path), 0)
    assert heat.shape == (16, 16)
    assert (heat.min() >= 0, heat.max()) == (True, 1)
    damaged = Path(shutil.copytree(sealed, tmp_path / "damaged"))
    with (damaged / "model.onnx").open("ab") as file:
        file.write(b"x")
    with pytest.raises(InputError, match=r"is damaged: model\.onnx is not"):
        load(str(damaged))
