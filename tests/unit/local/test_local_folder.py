"""Local runs: their folder, their output, and the survey of photographs before one."""

import io
import itertools
import json
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from kfp_ddp.cli import run as cli_run
from kfp_ddp.client.run import follow
from kfp_ddp.client.run.run_info import local_run
from kfp_ddp.core.errors import InputError, JobError, KfpDdpError, StorageError
from kfp_ddp.local import demo, display, engine, runs
from kfp_ddp.local.display import CLEAR_LINE, Phase
from kfp_ddp.local.folder import LocalRun, begin, link_latest, locked, unfinished
from kfp_ddp.local.survey import resolve_source, survey
from tests import photographs, run_output
from tests.commands import call, document, output, refused
from tests.files import write
from tests.run_output import Terminal


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def to_resume(output: Path | None, identity: str) -> LocalRun | None:
    """Return the run that a command resumes, as `begin` returned it."""
    earlier = unfinished(output, identity)
    return earlier and earlier.replace(seal="")


def complete(run: LocalRun) -> None:
    run.replace(complete=True).write()


def test_each_command_has_a_folder_until_it_is_complete(tmp_path: Path) -> None:
    first = begin(LocalRun(identity="a"), None, "photos")
    other = begin(LocalRun(identity="b"), None, "photos")
    assert (first.folder.name, other.folder.name) == ("photos", "photos-2")
    assert first.data == other.data
    assert first.data.parent == tmp_path / "run-output" / "data"
    assert to_resume(None, "a") == first
    complete(first)
    assert unfinished(None, "a") is None
    stopped, fresh = (begin(LocalRun(identity="f"), None, "photos") for _ in range(2))
    for at, run in enumerate((stopped, fresh)):
        os.utime(run.folder / "run.json", (at, at))
    assert to_resume(None, "f") == fresh
    complete(fresh)
    assert unfinished(None, "f") is None, "not the one that --fresh left"
    link_latest(other)
    link_latest(first)
    assert (tmp_path / "run-output" / "latest").resolve() == first.folder
    assert begin(LocalRun(identity="c"), None, "latest").folder.name == "latest-2"


@pytest.mark.parametrize("levels", [1, 40])
def test_files_of_a_killed_run_are_removed(monkeypatch: pytest.MonkeyPatch, levels: int) -> None:
    """Sockets are possible there, however long the path of the run."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        (system := Path(short, "t")).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(system))
        output = Path(short, *["o"] * levels)
        output.mkdir(parents=True)
        killed = engine._temporary(output)
        (left := killed.__enter__() / "left").touch()
        with engine._temporary(output) as folder, socket.socket(socket.AF_UNIX) as one:
            one.bind(str(folder / f"pymp-{1:08}-listener-{1:08}"))
            assert not left.exists()
            assert folder.is_relative_to(output) == (levels == 1)
        assert [*system.iterdir(), *output.iterdir()] == []


def test_model_in_the_named_folder_is_only_replaced_on_request(tmp_path: Path) -> None:
    folder = run_output.make(tmp_path / "mine")
    with pytest.raises(InputError, match="no demo"):
        demo.run(folder, 1, {})
    with pytest.raises(InputError, match="--replace"):
        begin(LocalRun(identity="a"), folder, "")
    assert list(folder.glob("work/*/train"))
    run = begin(LocalRun(identity="a"), folder, "", replace=True)
    assert (run.folder, run.data.parent) == (folder, folder / "data")
    assert not (folder / "work").exists()
    assert to_resume(folder, "a") == run
    assert begin(LocalRun(identity="b"), folder, "").seed != run.seed


FOREIGN = {
    "a file of this name": {"run.json": '{"name": "of another program"}'},
    "with our fields": {"run.json": json.dumps({"identity": "a", "arguments": {}})},
    "a log of this name": {"pipeline.log": "of another program"},
    "an output folder": {"notes.txt": "mine"},
}


@pytest.mark.parametrize("files", FOREIGN.values(), ids=FOREIGN)
def test_a_folder_without_our_record_is_not_touched(tmp_path: Path, files: dict[str, str]) -> None:
    folder = tmp_path / "project"
    mine = {**files, "work/thesis.tex": "a", "artifacts/a.pdf": "b", "cache/c": "", "bundle/d": "d"}
    for name, text in mine.items():
        write(folder / name, text)
    with pytest.raises(InputError, match="--output"):
        begin(LocalRun(identity="a"), folder, "", True)
    with pytest.raises(InputError, match="--output"):
        demo.run(folder, 1, {})
    left = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.*")}
    assert left.items() >= {name: text for name, text in mine.items() if "." in name}.items()


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_of_a_stranger_is_not_written_to(tmp_path: Path, kind: str) -> None:
    """A project that is downloaded may have a link of this name, to a file of the user."""
    mine = write(tmp_path / "mine.txt", "mine")
    (folder := tmp_path / "demo-output").mkdir()
    if kind == "link":
        (folder / ".lock").symlink_to("../mine.txt")
    else:
        os.mkfifo(folder / ".lock")
    with pytest.raises(StorageError, match="--output"):
        demo.run(folder, 1, {})
    assert mine.read_text() == "mine"


def test_what_a_run_did_not_create_is_not_deleted_by_the_next(tmp_path: Path) -> None:
    run = begin(LocalRun(identity="a", deletes=("work", "artifacts")), tmp_path / "mine", "")
    (run.folder / "cache").mkdir()
    with pytest.raises(InputError, match="holds cache"):
        begin(LocalRun(identity="b"), run.folder, "")


def test_running_command_is_refused_and_keeps_its_cache(tmp_path: Path) -> None:
    run = begin(LocalRun(identity="a"), None, "photos")
    (run.folder / "cache").mkdir()
    with locked(run.folder), pytest.raises(InputError, match="is running in"):
        engine.run(run, 0.0, {}, {})
    assert (run.folder / "cache").is_dir()
    (run.folder / ".lock").unlink()
    (run.folder / ".lock").mkdir()  # as a folder that is read-only now
    with pytest.raises(StorageError, match="--output"):
        engine.run(run, 0.0, {}, {})


def test_status_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_output.make(tmp_path / "mine", failed="train")
    (tmp_path / "latest").symlink_to(folder.name)
    answer = call("status", "latest", "--json")
    assert answer.exit_code == 1
    status = json.loads(answer.stdout)
    assert (status["name"], status["state"]) == ("mine", "FAILED")
    train = next(step for step in status["steps"] if step["name"] == "train")
    assert (train["state"], train["end"] > train["start"]) == ("FAILED", True)
    followed = call("status", "latest", "--follow")
    assert isinstance(followed.exception, JobError)
    assert "mine" in str(followed.exception)
    stopped = begin(LocalRun(identity="a"), None, "photos").folder
    assert local_run(stopped).state == "UNFINISHED"
    with locked(stopped):
        assert local_run(stopped).state == "RUNNING"
        monkeypatch.setattr(
            follow, "sleep", lambda _: shutil.copyfile(folder / "run.json", stopped / "run.json")
        )
        followed = call("status", stopped, "--follow")
    assert "teardown" in followed.output
    assert isinstance(followed.exception, JobError)
    (stopped / "run.json").write_text("null")  # of another program
    assert unfinished(stopped, "a") is None
    for other in (stopped, tmp_path):
        with pytest.raises(InputError, match="contains no run"):
            local_run(other)


class Begun(NamedTuple):
    """What a command would run."""

    run: LocalRun
    arguments: dict[str, Any]
    environment: dict[str, str]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Begun]:
    """The runs that commands begin, each of which stops at once."""
    runs_begun = list[Begun]()

    def execute(
        run: LocalRun,
        arguments: dict[str, Any],
        compiled: Path,
        detail: object,
        environment: dict[str, str] | None = None,
        known: object = (),
    ) -> LocalRun:
        runs_begun.append(Begun(run, arguments, environment or {}))
        raise JobError("stopped")

    monkeypatch.setattr(engine, "execute", execute)
    return runs_begun


COMMANDS = {
    "train": ["run", "photos", "--local", "--set", "pretrained=false"],
    "sweep": ["run", "photos", "--local", "--pipeline", "sweep"],
    "demo": ["demo"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("place", ["default", "--output"])
def test_a_record_of_somebody_else_is_not_resumed(
    command: str, place: str, tmp_path: Path, begun: list[Begun], monkeypatch: pytest.MonkeyPatch
) -> None:
    photographs.write(tmp_path / "photos", each=12)
    words = COMMANDS[command] + (["--output", "mine"] if place == "--output" else [])
    with monkeypatch.context() as other:
        other.setenv("XDG_CONFIG_HOME", str(tmp_path / "theirs"))
        call(*words)
        call(*words)
    first, second = begun
    assert (first.run.folder, first.run.seed) == (second.run.folder, second.run.seed)
    kept = (first.run.folder / "run.json").read_text()
    answer = call(*words)
    assert (first.run.folder / "run.json").read_text() == kept
    if place == "default" and command != "demo":
        assert begun[-1].run.folder.name == "photos-2"
        assert not {first.run.seed, first.run.data} & {begun[-1].run.seed, begun[-1].run.data}
        assert "run-output/photos is not resumed" in answer.stdout
    else:
        assert isinstance(answer.exception, InputError)
        assert "--output" in str(answer.exception)
        assert len(begun) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_a_resumed_run_has_only_its_place_and_seed_from_the_record(
    command: str, tmp_path: Path, begun: list[Begun]
) -> None:
    photographs.write(tmp_path / "photos", each=12)
    call(*COMMANDS[command])
    record = begun[0].run.folder / "run.json"
    fields = json.loads(record.read_text())
    assert not {"arguments", "environment"} & fields.keys()
    assert begun[0].arguments["sync"]["verify"] == "quick"
    hostile = {
        "arguments": {"training": {"model_code": "x"}, "destination": "/theirs"},
        "environment": {"LD_PRELOAD": "/theirs.so", "PYTHONPATH": "/theirs"},
        "folder": "/theirs",
        "data": "/theirs",
    }
    record.write_text(json.dumps(fields | hostile))
    call(*COMMANDS[command])
    assert begun[1].run.replace(seal="") == begun[0].run
    assert begun[1].arguments == begun[0].arguments
    assert begun[1].environment.keys() == begun[0].environment.keys()
    assert "LD_PRELOAD" not in begun[1].environment
    record.write_text(json.dumps(fields | {"deletes": ["work", "photos"]}))
    call(*COMMANDS[command])
    assert [one.run.folder for one in begun[2:]] != [begun[0].run.folder]


@pytest.mark.parametrize("pipeline", ["train_resnet", "sweep"])
def test_an_option_has_an_effect_or_is_refused(
    pipeline: str, tmp_path: Path, begun: list[Begun]
) -> None:
    photographs.write(tmp_path / "photos", each=12)
    words = ["run", "photos", "--local", "--pipeline", pipeline, "--set", "pretrained=false"]
    for option in cli_run.run.params:
        if option.name in (*cli_run.EVERYWHERE, *cli_run.LOCAL_ONLY):
            continue
        values = [] if option.is_flag else ["1"]  # type: ignore[attr-defined]
        assert "leave it out with --local" in refused(*words, option.opts[0], *values)
    assert begun == []
    models = str(tmp_path / "models")
    stopped = call(*words, "--destination", models).exception
    assert isinstance(stopped, JobError), stopped
    assert begun[0].arguments["destination"] == models
    for name in cli_run.LOCAL_ONLY:
        values = ["1"] if name in ("output", "ranks") else []
        assert "with --local" in refused("run", "gs://bucket/x", f"--{name}", *values)


def test_a_run_of_0_1_0_is_shown_and_not_resumed(tmp_path: Path) -> None:
    fields = {"format": "kfp-ddp local run 1", "identity": "a", "arguments": {}, "complete": False}
    old = write(tmp_path / "run-output/old/run.json", json.dumps({**fields, "deletes": ["work"]}))
    assert local_run(old.parent).state == "UNFINISHED"
    assert unfinished(None, "a") is None
    assert begin(LocalRun(identity="a"), None, "old").folder.name == "old-2"
    write(old, json.dumps({**fields, "complete": True}))
    assert local_run(old.parent).state == "SUCCEEDED"
    with pytest.raises(InputError, match="--output"):
        begin(LocalRun(identity="a"), old.parent, "", True)


ODD: list[Any] = [
    *(None, True, -1, 5, 1e300, float("nan"), float("inf"), -1e-300, 10**400, 2**63, 1.5),
    *("", "5", "x" * 2000, "\ud800", "\x1b[2J<b>[red]", "../..", "\0", [], {}, [[]], {"": 0}),
    [{"name": 5}],
    [{"name": "\x1b]0;x", "state": "RUNNING", "start": 1e300}],
    [{"name": "train", "state": "RUNNING", "start": 5, "end": -7}],
]


def test_no_record_ends_a_command_with_a_traceback(tmp_path: Path) -> None:
    folder = run_output.make(tmp_path / "run", failed="train")
    record = folder / "run.json"
    fields = json.loads(record.read_text())
    texts = ["", "null", "[" * 100_000, '{"a":' * 3000, "{}" + " " * 2_000_000, "\0", "1" * 5000]
    texts += [json.dumps(fields | {name: odd}) for name in fields for odd in ODD]
    texts += [json.dumps({key: fields[key] for key in fields if key != name}) for name in fields]
    commands: list[list[object]] = [["status"], ["describe"], ["logs"], ["compare", folder]]
    for text, words in zip(texts, itertools.cycle(commands), strict=False):
        record.write_text(text)
        ended = call(*words, folder).exception
        assert isinstance(ended, KfpDdpError | SystemExit | None), (text[:200], words)


@pytest.mark.parametrize("name", ["run.json", "pipeline.log"])
@pytest.mark.parametrize("kind", ["zero", "pipe", "folder"])
def test_a_file_without_an_end_is_not_read(tmp_path: Path, name: str, kind: str) -> None:
    folder = run_output.make(tmp_path / "run", failed="train")
    (folder / name).unlink()
    if kind == "zero":
        (folder / name).symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).mkdir()
    for words in (["status"], ["describe"], ["logs"]):
        answer = call(*words, folder)
        assert isinstance(answer.exception, KfpDdpError | SystemExit | None)


def test_a_sweep_is_checked_without_a_training(tmp_path: Path, begun: list[Begun]) -> None:
    photographs.write(tmp_path / "photos", each=12)
    space = 'sweep={"space": {"learning_rate": [0.1, 0.2, 0.3]}}'
    words = [*COMMANDS["sweep"], "--set", space, "--set", "model=cifar_resnet8"]
    short = document(*words, "--set", "epochs=2", "--dry-run")
    long = document(*words, "--set", "epochs=200", "--check")
    assert (short["trials"], long["trials"]) == (3, 3)
    assert long["minutes"] > max(0.5, short["minutes"])
    limited = document(*words, "--set", "epochs=200", "--set", "max_minutes=0.5", "--check")
    assert limited["minutes"] == 0.5
    text = output(*words, "--check")
    assert "3 trials" in text
    assert "36 images in 3 classes" in text
    assert "did you mean" in refused(*words, "--set", "sweep.max_minuts=1", "--check")
    (tmp_path / "photos" / "bark" / "img 0.jpg").write_bytes(b"broken")
    assert "bark" in refused(*words, "--check")
    assert begun == []
    assert not (tmp_path / "run-output").exists()


def test_report_of_the_gate_is_copied_to_the_top(tmp_path: Path) -> None:
    assert runs.report(tmp_path) == {}
    write(tmp_path / "artifacts/run/gate/gate_report", "<html>")
    assert runs.report(tmp_path) == {"report": str(tmp_path / "report.html")}
    assert (tmp_path / "report.html").read_text() == "<html>"


def test_line_of_a_step_in_a_loop_is_of_the_newest_iteration(tmp_path: Path) -> None:
    assert runs.describe_step(tmp_path, "train") == ""
    for iteration, step in enumerate((18, 24)):
        artifacts = {"what": {"artifacts": [{"metadata": {"step": step}}]}}
        folder = tmp_path / f"artifacts/run/for-loop-1-iteration-{iteration}/train"
        written = write(folder / "executor_output.json", json.dumps({"artifacts": artifacts}))
        os.utime(written, (9 - iteration, 9 - iteration))
    assert runs.describe_step(tmp_path, "train") == "18 steps"
    rows = [
        {"event": "start", "steps_total": 180},
        *({"event": "step", "step": s, "time": s, "images_per_s": 5} for s in (5, 65)),
        {"event": "end", "step": 69, "status": "done", "reason": "accuracy has not improved"},
    ]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    write(tmp_path / "work/run/train/metrics.jsonl", text)
    line = "69 of 180 steps, stopped early, 5 images/s"
    assert runs.describe_step(tmp_path, "train") == line
    assert display.RunProgress(tmp_path).line(80).endswith("180 · 5 images/s · stopped early")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_line_neither_wraps_nor_cuts_words(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream, words = Terminal(), [f"word{number}" for number in range(40)]
    phase = Phase("dataset-volume", stream)
    phase.show(" ".join(words))
    phase.end(good=True)
    drawn = stream.getvalue().replace("\n", CLEAR_LINE).split(CLEAR_LINE)
    assert max(len(line) for line in drawn) < columns
    assert {word for line in drawn for word in line.split() if word[:4] == "word"} == {*words}


def test_time_left_stays_in_a_narrow_terminal(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="train")
    for width, parts in ((22, ["step", "ETA"]), (49, ["step", "val", "ETA"]), (66, ["██", "loss"])):
        line = display.RunProgress(run).line(width)
        assert len(line) <= width
        assert all(part in line for part in (*parts, "ETA")), line


def test_log_has_a_line_a_minute_and_one_per_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    phase = Phase("train", stream)
    phase.show("step 1")
    monkeypatch.setattr(display, "LOG_SECONDS", 0.0)
    phase.show("step 2")
    phase.end(good=True)
    lines = stream.getvalue().splitlines()
    assert [line.split()[:4] for line in lines] == [[m, "train", "step", "2"] for m in "…✓"]
    Phase("gate", stream).end(good=False)
    assert "\n  ✗ gate" in stream.getvalue()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three classes, and all that lies about in such folders."""
    for label in ("a", "b", "c\u200b"):
        (tmp_path / label).mkdir()
        for number in range(9 if label > "b" else 20):
            Image.new("RGB", (60, 40), "red").save(tmp_path / label / f"{number}.jpg")
    cut, empty = tmp_path / "a" / "3.jpg", tmp_path / "a" / "4.jpg"
    whole = cut.read_bytes()
    thumbnail = b"\xff\xe1" + (len(whole) + 2).to_bytes(2) + whole  # as cameras have it
    cut.write_bytes((whole[:2] + thumbnail + whole[2:])[: len(whole) + 640])
    empty.write_bytes(b"")
    os.mkfifo(tmp_path / "b" / "pipe.png")
    others = ("__MACOSX/._3.jpg", ".DS_Store", "a/Thumbs.db", "b/x.svg", "b/y.svg", "labels.csv",
              "lost+found/1.jpg")  # fmt: skip
    for name in others:
        write(tmp_path / name, "x")
    return tmp_path


def test_a_tilde_is_the_home_or_a_part_of_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("home/photos", "here/~x", "here/~"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("HOME", f"{tmp_path}/home")
    monkeypatch.chdir(tmp_path / "here")
    for source in ("~x", "./~x", f"{tmp_path}/here/~x", f"file://{tmp_path}/here/~x"):
        assert resolve_source(source) == f"{tmp_path}/here/~x"
    assert resolve_source("~/photos") == f"{tmp_path}/home/photos"
    assert resolve_source("./~") == f"{tmp_path}/here/~"


def test_a_name_that_the_sync_refuses_is_refused_before(photos: Path) -> None:
    write(photos / "not copied\n.txt", "x")
    for icon in ("Icon\r", "a/Icon\r", ".Trash-1000/files/a\n.jpg"):
        write(photos / icon, "")
    assert survey(str(photos), {}).photographs.classes == 3
    write(photos / "a" / "1\n.jpg", (photos / "a" / "1.jpg").read_bytes())
    with pytest.raises(InputError, match="hostile_names"):
        survey(str(photos), {})
    assert survey(str(photos), {"sync": {"hostile_names": "encode"}}).photographs.classes == 3


def test_classes_broken_images_and_other_files_are_counted(photos: Path) -> None:
    surveyed = survey(str(photos), {})
    names = [Path(path).name for path in surveyed.broken]
    assert sorted(names) == ["3.jpg", "4.jpg", "pipe.png"]
    assert surveyed.photographs.train + surveyed.photographs.val == 18 + 20 + 9
    assert (surveyed.photographs.classes, surveyed.photographs.short_side) == (3, 40)
    rows = dict(line.split()[:2] for line in surveyed.table)
    assert list(rows) == ["class", "a", "b", r"c\u200b", "all"]
    assert int(rows["all"]) == surveyed.photographs.train
    notes = "\n".join(surveyed.photographs.notes)
    assert "3 files not read: 2 .svg, 1 .csv" in notes
    assert "33% of the longer side" in notes
    for fit in ("pad", "squash"):
        assert "longer side" not in str(survey(str(photos), {"training": {"fit": fit}}))
    assert "labels=labels.csv" in notes
    assert r"c\u200b" in notes, "few images"
    assert "\n".join(surveyed.left_out).count("a/") == 2
    with pytest.raises(InputError, match=r"labels b/pipe\.png cannot be read .*not a plain file"):
        survey(str(photos), {"training": {"labels": "b/pipe.png"}})
    with pytest.raises(InputError, match=r"3 images .*3\.jpg .*--set on_bad_image=skip"):
        survey(str(photos), {"training": {"on_bad_image": "fail"}})
    assert "a/4.jpg: it is empty" in "\n".join(surveyed.left_out)
    assert {"*.csv", "*.svg", "/a/3.jpg", "/b/pipe.png"} < {*surveyed.excluded}
    assert "*.csv" not in survey(str(photos), {"gate": {"tags": "labels.csv"}}).excluded
    with pytest.raises(InputError, match=r"tags is label\.csv, but .* has no such file"):
        survey(str(photos), {"gate": {"tags": "label.csv"}})
    only_one = {"training": {"on_bad_image": "fail"}, "sync": {"exclude": ["3.jpg", "pipe.png"]}}
    with pytest.raises(InputError, match=r"^1 image cannot be read"):
        survey(str(photos), only_one)
    (photos / "a/link.jpg").symlink_to(photos / "a/1.jpg")
    sync = {"exclude": ["/b/1?.jpg", *surveyed.excluded], "symlinks": "skip"}
    left = survey(str(photos), {"sync": sync})
    assert not left.broken
    assert "13 of 50 images left out by exclude" in left.photographs.notes
    for name in ("up", "also_up"):  # each visit of either finds both again
        (photos / "a" / name).symlink_to("..")
    followed = survey(str(photos), {"sync": {"symlinks": "follow"}}).photographs
    assert followed.train + followed.val == 18 + 20 + 9 + 1  # with a/link.jpg


def test_interrupted_run_takes_mended_image(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[tuple[LocalRun, dict[str, Any]]]()
    monkeypatch.setattr(engine, "run", lambda run, _, given, *more: begun.append((run, given)))
    command = runs.Command(str(photos), photos.with_name("out"), ["pretrained=false"])
    runs.train(command)
    shutil.copyfile(photos / "a" / "1.jpg", photos / "a" / "3.jpg")
    runs.train(command)
    (first, _), (second, _) = begun
    assert (first.folder, first.seed) == (second.folder, second.seed)
    left_out = [set(given["sync"]["exclude"]) for _, given in begun]
    assert left_out[0] - left_out[1] == {"/a/3.jpg"}


def test_notes_count_what_can_be_read(photos: Path) -> None:
    for part, count in (("train", 12), ("val", 2)):
        for label in "xy":
            (photos / part / label).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (60, 40)).save(photos / part / label / f"{number}.png")
    for name in ("train/x/0", "train/x/1", "train/x/2", "val/y/0", "val/y/1"):
        (photos / f"{name}.png").write_text("no image")
    for more in ({}, {"script": "mine.py"}):  # which reads all files
        surveyed = survey(str(photos), {"training": more})
        assert surveyed.photographs.notes[-2:] == (
            "1 class without images to validate, so no classes are distinguished: "
            "y (12 to train on)",
            "1 class with fewer than 10 images to train on: x (9)",
        )
    for number in range(3, 12):
        (photos / f"train/x/{number}.png").write_text("no image")
    with pytest.raises(InputError, match=r"14 images cannot .* class folder train/x has no images"):
        survey(str(photos), {})


def test_table_of_many_classes_fits_a_screen(tmp_path: Path) -> None:
    for label in range(40):
        (tmp_path / f"{label:02}{'x' * 60}").mkdir()
        for number in range(4):
            Image.new("RGB", (9, 9)).save(tmp_path / f"{label:02}{'x' * 60}" / f"{number}.png")
    table = survey(str(tmp_path), {}).table
    assert len(table) == 23
    assert max(map(len, table)) <= 80
    assert "20 more" in table[-2]


def test_archive_is_to_be_unpacked(tmp_path: Path) -> None:
    (tmp_path / "photos.zip").touch()
    with pytest.raises(InputError, match="unpack"):
        resolve_source(str(tmp_path / "photos.zip"))
