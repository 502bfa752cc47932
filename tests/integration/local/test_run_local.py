"""`kfp-ddp run --local` and `kfp-ddp predict` on photographs in class folders, without a split."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kfp_ddp import Client
from kfp_ddp import predict as predict_module
from kfp_ddp.local.folder import LocalRun, begin
from kfp_ddp.local.results import summary_lines
from kfp_ddp.predict import load
from tests import photographs
from tests.commands import call, document, refused
from tests.tolerance import near

SMALL = ("model=cifar_resnet8", "image_size=16", "epochs=1", "cache_gb=0", "exclude=*.mp4")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = photographs.write(tmp_path_factory.mktemp("home") / "my photos", each=24)
    (folder.parent / "w.pth").touch()
    for name in ("notes.txt", "walk.mp4"):
        (folder / name).write_text("not an image")
    return folder


@pytest.fixture(scope="module")
def ran(photos: Path) -> "subprocess.CompletedProcess[str]":
    """The command, given a folder relative to where it was called, on one rank.

    It may export the first model, to a folder that does not exist yet.
    """
    program = [sys.executable, "-m", "kfp_ddp", "run", photos.name, "--local"]
    options = ["--ranks", "1", "--output", "result", "--json"]
    begin(LocalRun(identity=""), photos.parent / "result", "")
    for name in ("pipeline.log", "labels_to_check.csv", "labels_to_check-1.csv"):
        (photos.parent / "result" / name).write_text(f"{name} of an earlier run")
    exports = (f"destination={photos.parent / 'models'}", "champion=last")
    settings = [word for one in (*SMALL, *exports) for word in ("--set", one)]
    for name in ("calendar", "kfp", "random", "sitecustomize", "torch"):
        (photos.parent / f"{name}.py").write_text("raise SystemExit('a file of the dataset ran')")
    return subprocess.run(
        [*program, *options, *settings],
        cwd=photos.parent,
        env=os.environ | {"RANK": "2", "WORLD_SIZE": "4", "PET_NNODES": "3"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def summary(ran: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout))


@pytest.mark.slow
def test_folder_becomes_a_report_and_a_bundle(
    ran: "subprocess.CompletedProcess[str]", summary: dict[str, Any], photos: Path
) -> None:
    assert json.loads((photos.parent / "result" / "summary.json").read_text()) == summary
    assert (summary["files"], summary["files_copied"], summary["ranks"]) == (72, 72, 1)
    assert 0 <= summary["accuracy"] <= 1
    report = Path(summary["report"]).read_text()
    assert f"<b>{summary['verdict']}</b><p>{summary['expectation']}</p>" in report
    end = "\n".join(summary_lines(summary))
    assert all(summary[name] in end for name in ("expectation", "cause"))
    assert " will be" in summary["expectation"]
    assert "<svg" in report
    assert "1 file not read: 1 .txt" in report
    assert "note: 1 file not read: 1 .txt" in ran.stderr
    assert ran.stderr.count("classes and splits: ") == 1
    assert (Path(summary["bundle"]) / "_SUCCESS").is_file()
    kept = photos.parent / "result" / "labels_to_check-2.csv"
    assert kept.read_text() == "labels_to_check.csv of an earlier run"
    assert "72 images in 3 classes; " in ran.stderr
    assert "cifar_resnet8 at 16 px, 1 epoch" in ran.stderr


def test_cut_out_is_predicted_as_its_flat_copy(summary: dict[str, Any], photos: Path) -> None:
    names, network = ("cut.png", "flat.jpg"), load(summary["bundle"])
    assert network.interface.reading.background == "#ffffff"
    for path in sorted(photos.rglob("*.jpg"))[::12]:
        cut = Image.open(path).convert("RGBA")
        hole = (0, 0, cut.width // 2, cut.height)
        cut.paste((0, 255, 0, 0), hole)
        cut.save(photos.parent / names[0])
        cut.paste((255, 255, 255, 255), hole)
        cut.convert("RGB").save(photos.parent / names[1], quality=100)
        first, second = network([photos.parent / name for name in names])
        assert first.argmax() == second.argmax()
        assert first == pytest.approx(second, abs=0.02)


def test_predictions_equal_the_evaluation(summary: dict[str, Any], photos: Path) -> None:
    with (Path(summary["bundle"]) / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    network = load(summary["bundle"])
    for row, predicted in zip(rows, network([photos / row["path"] for row in rows]), strict=True):
        assert network.classes[predicted.argmax()] == row["predicted"]
        assert predicted.max() == pytest.approx(float(row["confidence"]), abs=1e-3)


def test_torch_predicts_the_same_without_onnx_runtime(
    summary: dict[str, Any], photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = sorted(photos.rglob("*.jpg"))[:3]
    first = load(summary["bundle"])
    monkeypatch.setattr(predict_module, "find_spec", lambda n: None if n == "onnxruntime" else n)
    second = load(summary["bundle"])
    assert (first.runtime, second.runtime) == ("onnxruntime", "torch")
    assert second(pictures) == near(first(pictures))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("gs:/bucket/x",), "write gs://bucket/x"),
        (("./nowhere",), "nowhere does not exist; give a folder"),
        (("{photos}/bark/img 0.jpg",), "is no folder: give the one"),
        (("{photos}/bark",), "in no class folder"),
        (("{photos}", "--set", "backend=local"), "backend cannot be set: it is local with --local"),
        (("{photos}", "--output", "{photos}/out"), "contain each other"),
        (("{photos}", "--ranks", "2", "--set", "nproc_per_node=2"), "are one setting"),
        (("{photos}", "--set", "recipe=cifar"), "128 but only 60 training images; lower"),
        (("{photos}", "--set", "pretrained=imagenet"), "there is no file imagenet: give"),
        (("{photos}", "--set", "pretrained={photos}/../w.pth"), "no readable weights"),
        (("{photos}", "--output", "{other}"), "holds work, which is not of a run"),
    ],
)
def test_invalid_input_is_one_line_before_anything_is_copied(
    words: tuple[str, ...], line: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other"
    (other / "work").mkdir(parents=True)
    filled = [word.format(photos=photos, other=other) for word in words]
    assert line in refused("run", *filled, "--local")
    assert list(tmp_path.rglob("*")) == [other, other / "work"]


def test_check_shows_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    photographs.write(tmp_path / "photos", each=12)
    words = ["run", "photos", "--local", "--check", "--set", "pretrained=false", "--json"]
    check = json.loads(call(*words).stdout)
    assert (check["train"] + check["val"], check["broken"]) == (36, {})
    assert check["settings"]["training"]["on_bad_image"] == "skip"
    for word in ("max_object_mb=0.001", "champion=x/y", "sign_key=x", "evaluate_backend=trainjob"):
        refused(*words, "--set", word)
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_empty_class_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    source, output = photographs.write(tmp_path / "photos", each=12), tmp_path / "output"
    (source / "sand").mkdir()
    error = refused("run", source, "--local", "--output", output, "--set", "exclude=*.png")
    assert error.startswith("class folder sand has no images")
    assert not output.exists()


@pytest.mark.slow
def test_a_sweep_ends_with_its_trials_and_a_bundle(tmp_path: Path) -> None:
    folder = photographs.plain(tmp_path / "photos", 16)
    settings = ["model=cifar_resnet8", "image_size=16", "epochs=1", "nproc_per_node=1"]
    settings.append('sweep={"space": {"learning_rate": [0.05, 1e-6]}}')
    words = [word for one in settings for word in ("--set", one)]
    program = [sys.executable, "-m", "kfp_ddp", "run", str(folder), "--local"]
    options = ["--pipeline", "sweep", "--output", "swept"]
    done = subprocess.run(
        [*program, *options, *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if "learning_rate=" in line]
    assert [row[0] for row in rows] == ["1", "2"]
    assert {row[-1] for row in rows} == {"learning_rate=0.05", "learning_rate=1e-06"}
    swept = tmp_path / "swept"
    summary = json.loads((swept / "summary.json").read_text())
    assert [Path(summary[name]).is_file() for name in ("report", "sweep_report", "loss_curve")] == (
        [True] * 3
    )
    assert Client().get_run(swept).summary == summary
    described = document("describe", swept)
    assert [trial["rank"] for trial in described["trials"]] == [1, 2]
    assert f"kfp-ddp predict {swept} PICTURE" in described["next"]
    assert call("predict", swept, folder / "dark" / "0.png").exit_code == 0
