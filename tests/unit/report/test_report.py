"""The report of an evaluation, and its command."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp import report
from kfp_ddp.core import packed
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.files import sha256
from kfp_ddp.models.evaluation import FIGURES, ClassChange, Compared, Evaluation, slice_of
from kfp_ddp.training.spec.time_spent import PHASES
from tests import reports, run_output
from tests.commands import call, output, refused
from tests.files import write
from tests.gating import judged

TWO = ["cat", "dog"]
COUNTS = [[45, 5], [3, 47]]
EVIL = "<script>alert(1)</script>"


def text(document: str) -> str:
    """Return the visible text of a page."""
    body = document.partition("</style>")[2]
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


def bundled(root: Path, **documents: object) -> Path:
    """Write the JSON documents of a bundle and return its folder."""
    folder = root / "bundle"
    folder.mkdir()
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


def test_the_verdict_comes_first_and_failed_rules_before_others(tmp_path: Path) -> None:
    verdict = {
        "blessed": False,
        "reason": "not blessed: dark is too low",
        "rules": [
            {"rule": "min_accuracy", "holds": True, "words": "accuracy 0.92 >= 0.9"},
            {"rule": "min_slice_accuracy", "holds": False, "words": "light=dark 0.4 < 0.8"},
        ],
    }
    phases = {phase: [1.0, 2.0] for phase in PHASES}
    steps: list[dict[str, object]] = [{"event": "ranks", "seconds": phases}]
    steps += [{"event": "eval", "step": 1, "epoch": 1.0, "accuracy": 0.5}]
    more = {"verdict": verdict, "events": steps, "mistakes": [reports.mistake("a.png")]}
    document = report.html(reports.make(tmp_path, TWO, COUNTS, **more))
    order = ["Not blessed", "light=dark 0.4", "accuracy 0.92", "92.00%", "Classes, the lowest"]
    order += ["Worst mistakes", "Confusion", "Training", "Where the time", "Seconds of each rank"]
    places = [text(document).index(words) for words in order]
    assert places == sorted(places)
    assert 'class="verdict no"' in document
    verdict["rules"][1]["unproven"] = True  # type: ignore[index]
    document = report.html(reports.make(tmp_path, TWO, COUNTS, verdict=verdict))
    assert 'class="verdict maybe"><b>Not blessed: too few samples' in document


RANDOM = {"pretrained": "false"}
SMALL = reports.dataset(training={"cat": 20, "dog": 9})
LARGE = reports.dataset(training={"cat": 900, "dog": 900})


@pytest.mark.parametrize(
    ("counts", "rules", "level", "words", "causes"),
    [
        ([[12, 8], [8, 9]], {"min_accuracy": 0.5}, "maybe", "about 4 of 10 .* 29 to 59 %", 2),
        ([[80, 20], [25, 75]], {}, "maybe", "about 2 of 10 .* 17 to 29 %", 0),
        ([[98, 2], [4, 96]], {}, "yes", "about 3 of 100 .* 1.4 to 6.4 %", 0),
        ([[98, 2], [4, 96]], {"min_accuracy": 0.99}, "no", "about 3 of 100 ", 0),
        ([[85, 15], [25, 75]], {"min_accuracy": 0.75}, "yes", "about 2 of 10 ", 0),
        ([[90, 0], [8, 2]], {"min_accuracy": 0.9}, "maybe", "about 8 of 100 ", 0),
        ([[95, 0], [5, 0]], {"min_accuracy": 0.9}, "maybe", "about 5 of 100 ", 1),
        ([[19, 0], [0, 18]], {}, "yes", "none of 37 .* 9.4 %", 0),
        ([[4997, 3], [0, 5000]], {}, "yes", r"about 3 of 10,000 .* 0.010 to 0.088 %", 0),
        ([[3, 0], [2, 1]], {}, "maybe", "about 3 of 10 ", 2),
    ],
)
def test_the_verdict_says_in_plain_words_what_holds(
    tmp_path: Path,
    counts: list[list[int]],
    rules: dict[str, Any],
    level: str,
    words: str,
    causes: int,
) -> None:
    few = causes == 2
    more: dict[str, Any] = {"dataset": SMALL if few else LARGE, "config": RANDOM if few else {}}
    folder = reports.make(tmp_path / "run", ("cat", "dog"), counts, **more)
    accuracy = Evaluation.read(folder / "evaluation.json").accuracy
    blessed, _ = judged(tmp_path, accuracy, evaluation=f"{folder}/evaluation.json", **rules)
    box = re.search(r'(?s)class="verdict (\w+)".*?</div>', (tmp_path / "report.html").read_text())
    assert box is not None
    assert box[1] == level
    markdown = (tmp_path / "verdict.md").read_text()
    heading = {"yes": "Blessed", "maybe": "Blessed, but weak", "no": "Not blessed"}[level]
    if blessed or level == "no":
        assert f"<b>{heading}</b>" in box[0]
        assert markdown.startswith(f"## {heading}\n")
    for document in (text(f"</style>{box[0]}"), markdown):
        assert re.search(words, document)
        assert document.count("cause: ") in (causes, min(causes, 1))
        assert ("random weights" in document) is few
        assert ("few pictures: 29" in document) is few
        assert ("never right: dog" in document) is (causes == 1)


def test_a_missing_verdict_or_one_of_another_evaluation_is_not_shown(tmp_path: Path) -> None:
    folder = reports.make(tmp_path, TWO, COUNTS, verdict={"blessed": True, "reason": "fine"})
    own = sha256(folder / "evaluation.json")
    for digest, words in ((own, "Blessed"), ("0" * 64, "Not judged")):
        verdict = {"blessed": True, "reason": "fine", "evaluation_sha256": digest}
        (folder / "verdict.json").write_text(json.dumps(verdict))
        assert f"<b>{words}" in report.html(folder)
    (folder / "verdict.json").unlink()
    assert "<b>Not judged yet" in report.html(folder)


def test_the_head_has_origin_baseline_and_gain_over_the_champion(tmp_path: Path) -> None:
    changes = [
        ClassChange(name="cat", samples=50, won=6, lost=1, gain=0.1, low=0.02, high=0.2),
        ClassChange(name="dog", samples=50, won=0, lost=2, gain=-0.04, low=-0.1, high=0.01),
    ]
    compared = Compared(
        champion="gs://m/f", champion_version="8678a2311e54ff", champion_accuracy=0.89,
        gain=0.03, low=-0.01, high=0.07, p_value=0.125, won=6, lost=3, classes=changes,
    )  # fmt: skip
    start = {"event": "start", "time": 1000.0, "world_size": 2, "device": "NVIDIA H100"}
    first = {"event": "step", "time": 1030.0, "step": 1, "epoch": 0.5, "loss": 2.0}
    again = {**start, "time": 9000.0, "resumed_from_step": 1}
    last = {"event": "step", "time": 9040.0, "step": 2, "epoch": 1.0, "loss": 1.0}
    folder = reports.make(
        tmp_path / "evaluation", TWO, COUNTS, compared=compared, dataset=reports.dataset(),
        events=[start, first, again, last], config={"run_id": "r-17/train"},
        written="2026-11-22T13:17:36Z", hardware="2 x NVIDIA H100",
    )  # fmt: skip
    bundle = bundled(tmp_path, config={"export": {"made_of": {"model_name": "garden"}}})
    content = text(report.html(folder, bundle))
    assert content.startswith("garden on flowers resnet18, step 40")
    head = content[: content.index("Training")]
    for words in (
        "run r-17/train", "evaluated 2026-11-22 13:17 UTC", "version dddddddddddd, 900 train + 100",
        "in 70 s on 2 ranks (NVIDIA H100)", "92 of 100 samples of val are predicted correctly",
        "50.00% majority-class baseline: cat 42.00 points above it",
        "+3.00 points to champion 8678a2311e54 95 % interval −1.00 to +7.00",
        "6 samples are correct only with this model, 3 only with the champion", "p = 0.12",
        "Classes that improved class samples won / lost recall, points cat 50 6 / 1 +10.00",
        "Classes that got worse class samples won / lost recall, points dog 50 0 / 2 −4.00",
    ):  # fmt: skip
        assert words in head
    assert "evaluated on 2 x NVIDIA H100, in 1.0 s" in content
    judged = compared.model_copy(update={"gain": 0.05, "champion_version": "later"})
    verdict = {"blessed": True, "reason": "", "compared": judged.model_dump()}
    (folder / "verdict.json").write_text(json.dumps(verdict))
    assert "+5.00 points to champion later" in text(report.html(folder))
    worse = reports.make(tmp_path / "worse", TWO, [[20, 30], [30, 20]])
    assert "baseline: cat 10.00 points below it" in text(report.html(worse))


def test_the_share_of_mistakes_by_what_is_passed_on(tmp_path: Path) -> None:
    def page(folder: Path, counts: list[list[int]], wrong: str) -> str:
        """Return the page; the mistakes have another probability than 0.9."""
        made = reports.make(folder, TWO, counts)
        table = made / "predictions.csv"
        rows = table.read_text()
        for pair in ("cat,dog", "dog,cat"):
            rows = rows.replace(f"{pair},0.9", f"{pair},{wrong}")
        table.write_text(rows)
        return report.html(made)

    some = page(tmp_path / "some", COUNTS, "0.6")
    assert "If it may pass on 10% of the pictures" in text(some)
    assert "0.0% of the rest are wrong; of all pictures 8.0% are" in text(some)
    assert "is below 90.0%. 8.0% of these pictures are" in text(some)
    assert "as predict and serve have it" in some
    alike = page(tmp_path / "alike", COUNTS, "0.9")
    assert "8.0% of the rest are wrong; of all pictures 8.0% are" in text(alike)
    assert "No threshold: " in text(alike)
    assert "as predict and serve have it" not in alike
    few = page(tmp_path / "few", [[6, 1], [0, 2]], "0.6")
    assert "No threshold: " in text(few)
    for folder, counts in (("right", [[5, 0], [0, 5]]), ("none", COUNTS)):
        made = reports.make(tmp_path / folder, TWO, counts)
        if folder == "none":
            (made / "predictions.csv").unlink()
        assert "Unsure pictures" not in report.html(made)


def test_confusions_are_ranked_by_count_and_then_by_share(tmp_path: Path) -> None:
    names = ["large", "other", "small", "tiny", "mate", "none"]
    counts = [
        [380, 20, 0, 0, 0, 0],
        [12, 388, 0, 0, 0, 0],
        [0, 0, 5, 0, 3, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 400, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    folder = reports.make(tmp_path, names, counts)
    content = text(report.html(folder))
    assert "none 0 – – – " in content
    content = content[content.index("Most frequent confusions") :]
    pairs = re.findall(r"(\w+) (\w+) (\d+ of \d+) ", content)[:4]
    assert pairs == [
        ("large", "other", "20 of 400"),
        ("other", "large", "12 of 400"),
        ("small", "mate", "3 of 8"),
        ("tiny", "mate", "1 of 1"),
    ]


@pytest.mark.parametrize("with_matrix", [True, False])
def test_the_rows_of_a_part_of_a_large_matrix_add_up(tmp_path: Path, with_matrix: bool) -> None:
    n = 1000 if not with_matrix else 150
    names = [f"n{i:05} a rather long name of a class" for i in range(n)]
    counts = [[0] * n for _ in names]
    for i, row in enumerate(counts):
        row[i], row[(i + 1) % n], row[(i + 7) % n] = 20, i % 3, i % 2
    counts[40][41], counts[41][40], counts[40][90] = 15, 11, 1
    folder = reports.make(tmp_path, names, counts, confusion=counts if with_matrix else None)
    document = report.html(folder)
    assert len(document) < 600_000
    assert f"The 14 of {n:,} classes with the most confusion" in document
    drawn = re.findall(r"<title>(\S+) [^<]* predicted as ([^<]*): (\d+) of (\d+)</title>", document)
    of_40 = [(guess[:6], int(n), int(of)) for true, guess, n, of in drawn if true == "n00040"]
    total = sum(counts[40])
    assert ("n00040", 20, total) in of_40
    assert ("n00041", 15, total) in of_40
    assert sum(count for _, count, _ in of_40) == total
    assert any(guess == "other " for guess, _, _ in of_40)


def test_mistakes_have_paths_and_slices_have_intervals(tmp_path: Path) -> None:
    folder = reports.make(
        tmp_path, TWO, COUNTS,
        mistakes=[reports.mistake("val/a b.png")],
        surest=[reports.mistake("val/c.png"), reports.mistake("val/d.png", confidence=0.26)],
        dataset=reports.dataset(name="resnet18-3b9545"),
        slices=[slice_of("light", "day", 80, 84), slice_of("light", "", 12, 16)],
    )  # fmt: skip
    content = text(report.html(folder))
    assert content.startswith("resnet18 step 40")  # a dataset called like the model is not named
    assert "cat predicted as dog confidence 97.0% val/a b.png" in content
    assert "val/d.png" not in content
    assert content.index("Other mistakes with the highest confidence") < content.index("val/c.png")
    assert "light value samples correct accuracy 95 % interval none 16 12 75.00%" in content


def test_changed_settings_are_separate_from_defaults(tmp_path: Path) -> None:
    code = packed.pack(b"pass\n" * 1000)
    config = {"epochs": 7, "momentum": 0.9, "own": "x", "data": "/d", "model_code": code}
    content = text(report.html(reports.make(tmp_path, TWO, COUNTS, config=config)))
    file = "model_code a file of 5,000 bytes, sha256 b13680bfbc6b"
    assert f"differ from the default epochs 7 own x {file} 2 settings" in content
    assert "locations momentum 0.9" in content


def test_problems_of_the_data_are_listed(tmp_path: Path) -> None:
    # With a resume before the last event.
    known = [("a/1.jpg",), tuple(f"a/{at}.jpg" for at in range(1, 13)), ("b/1.jpg", "a/2.jpg")]
    events = [{"event": "unreadable", "images": len(files), "files": files} for files in known]
    folder = reports.make(
        tmp_path, TWO, COUNTS, skipped=3, skipped_files=["b/7.jpg"], events=events,
        dataset=reports.dataset(problems=["2 training images have the content of <val>"]),
    )  # fmt: skip
    content = text(report.html(folder))
    assert "2 training images have the content of &lt;val&gt;" in content
    assert "3 unreadable images of this split left out: b/7.jpg" in content
    assert "13 unreadable images skipped in the training: a/1.jpg, a/10.jpg" in content


def test_all_names_are_escaped_and_there_are_no_external_resources(tmp_path: Path) -> None:
    folder = reports.make(
        tmp_path / "e", [EVIL, "b"], COUNTS, model=EVIL, hardware=EVIL, device=EVIL,
        config={EVIL: EVIL, "run_id": EVIL}, slices=[slice_of(EVIL, EVIL, 1, 2)],
        dataset=reports.dataset(name=EVIL, source=EVIL, problems=[EVIL]),
        mistakes=[reports.mistake(EVIL, EVIL, EVIL).model_copy(update={"picture": f'"{EVIL}'})],
        verdict={"blessed": False, "reason": EVIL, "rules": [{"holds": False, "words": EVIL}]},
        compared=Compared(champion=EVIL, champion_version=EVIL, champion_accuracy=0.5, gain=0.4),
        events=[{"event": "start", "time": 1.0, "world_size": 1, "device": EVIL}],
    )  # fmt: skip
    left_out = {"left_out": {EVIL: EVIL}}
    infra = {"files": {EVIL: {"failed": EVIL}}}
    bundle = bundled(tmp_path, parity=left_out, variants=left_out, infra=infra)
    document = report.html(folder, bundle)
    assert "<script" not in document
    assert not re.search(r"""(src|href)=(?!"data:image/webp;base64,)|url\(|@import""", document)


def test_invalid_files_are_errors(tmp_path: Path) -> None:
    folder = reports.make(tmp_path, TWO, COUNTS)
    (folder / "report.json").write_text('{"mistakes": 3}')
    with pytest.raises(InputError, match=r"report\.json is invalid: mistakes"):
        report.html(folder)
    (folder / "evaluation.json").unlink()
    with pytest.raises(InputError, match=r"evaluation\.json cannot be read"):
        report.html(folder)


def test_gate_and_report_do_not_import_torch(tmp_path: Path) -> None:
    folder = reports.make(tmp_path, TWO, COUNTS)
    probe = (
        "import sys, kfp_ddp.evaluation.gate.engine\n"
        "from pathlib import Path; from kfp_ddp import report\n"
        f"report.write(Path({str(folder)!r}))\n"
        "assert not {'torch', 'numpy', 'PIL', 'google.cloud.storage'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)
    assert (folder / "report.html").stat().st_size < 100_000


def command(*words: object) -> str:
    return output("report", *words).strip()


def test_the_report_of_a_local_run_is_written_with_its_verdict(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run")
    beside = run / "work" / run_output.RUN_ID / "train" / "evaluation"
    (beside / "verdict.json").write_text(json.dumps({"blessed": False, "reason": "too <low>"}))
    formats = {"model.onnx": {"max_abs_difference": 2e-6, "same_top1": 1.0}}
    (beside.parent / "bundle" / "parity.json").write_text(json.dumps({"formats": formats}))
    (beside / "report.html").unlink()
    (beside / "report.html").symlink_to(mine := write(tmp_path / "mine.txt", "mine"))
    assert command(run) == str(beside / "report.html")
    assert mine.read_text() == "mine"
    made = (beside / "report.html").read_text()
    assert "<b>Not blessed</b>" in made
    assert "<p>too &lt;low&gt;</p>" in made
    assert "Loss by epoch" in made
    assert "<td>model.onnx</td><td>2e-06</td>" in made
    for folder in (beside, beside.parent):
        assert command(folder, "-o", tmp_path / "out.html") == str(tmp_path / "out.html")
        assert (tmp_path / "out.html").read_text() == made


def test_the_newest_evaluation_is_chosen(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", correct=90)
    work = run / "work" / run_output.RUN_ID
    run_output.task(work / "again", ("evaluate",), 70, {})
    os.utime(work / "train" / "evaluation" / "evaluation.json", (1, 1))
    assert command(run) == str(work / "again" / "evaluation" / "report.html")


def test_a_missing_evaluation_or_folder_is_an_error(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="evaluate")
    for words in ([run], [tmp_path / "none"], [run, "--split", "test"]):
        split = "test" if words[1:] else "val"
        assert f"contains no evaluation of {split}: name" in refused("report", *words)
    run = run_output.make(tmp_path / "complete")
    error = call("report", run, "-o", tmp_path / "none/out.html").exception
    assert isinstance(error, StorageError)
    assert f"cannot write to {tmp_path}/none/out.html: No such file" in str(error)


def test_an_evaluation_of_an_earlier_version_still_has_a_report(tmp_path: Path) -> None:
    run_output.task(tmp_path / "run", ("evaluate",), 90, {"model": "resnet18"})
    beside = tmp_path / "run" / "evaluation"
    record = json.loads((beside / "evaluation.json").read_text())
    later = ("intervals", "compared", "slices", "hardware", "world_size", "written")
    older = {name: value for name, value in record.items() if name not in later}
    (beside / "evaluation.json").write_text(json.dumps(older))
    command(tmp_path / "run")
    assert "90.00%" in (beside / "report.html").read_text()


def test_each_number_of_an_evaluation_is_in_the_table_of_figures() -> None:
    facts = {"correct", "image_size", "step", "seconds", "world_size"}
    numbers = [
        name
        for name, field in Evaluation.model_fields.items()
        if field.annotation in (int, float, float | None)
    ]
    assert sorted(figure.name for figure in FIGURES) == sorted(set(numbers) - facts)
    assert len({figure.title for figure in FIGURES}) == len(FIGURES)
