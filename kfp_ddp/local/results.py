"""Results of a local run: the outputs of its steps, and the summary."""

import contextlib
import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median_high
from typing import Any, TypeVar, cast

import click
import yaml

from kfp_ddp.core.outputs import (
    CHANGES,
    EVALUATE,
    EXPORT,
    GATE,
    PREDICT,
    PREFLIGHT,
    PUBLISH,
    SYNC,
    TEARDOWN,
    TRAIN,
    TUNE,
    VOLUME,
    StepOutputs,
    TrainFigures,
)
from kfp_ddp.core.packed import in_short
from kfp_ddp.core.run_folder import LABELS_TO_CHECK
from kfp_ddp.core.spreadsheet import Reader
from kfp_ddp.core.text import facts, plural
from kfp_ddp.jobs.progress import TrainingProgress
from kfp_ddp.local.display import say, shown
from kfp_ddp.models.bundle import MANIFEST
from kfp_ddp.runs.trials import Trials
from kfp_ddp.runs.trials import table as table_of_trials
from kfp_ddp.training.spec.metrics import read_events

T = TypeVar("T")

LOG = "pipeline.log"
SUMMARY = "summary.json"
"""In the folder of a local run: the results of the last one that was complete."""
SWEEP_REPORT = "sweep_report.html"
STARTED = re.compile(r"Executing task '([^']+)'")
ENDED = re.compile(r"Task '([^']+)' finished with status (\w+)")
SCORE = "(score near 1: the model is sure, near 0: it guesses)"
FORMATS = {"model.safetensors": "safetensors", "model.onnx": "ONNX", "model.pt2": ".pt2"}


def detail(output: Path, step: str) -> str:
    """Return a line about a successful step, from its outputs."""
    match step:
        case PREFLIGHT.step:
            return str(outputs_of(output, PREFLIGHT)["what"])
        case SYNC.step:
            sync = outputs_of(output, SYNC)
            copied = f"{sync['downloaded']:,} copied" if sync["downloaded"] else "none copied"
            return f"{sync['files']:,} files, {copied}, version {sync['digest'][:12]}"
        case CHANGES.step:
            return str(outputs_of(output, CHANGES)["reason"])
        case VOLUME.step:
            return "read in place: " + "/".join(Path(outputs_of(output, VOLUME)["path"]).parts[-2:])
        case TRAIN.step:
            return _training_detail(output, outputs_of(output, TRAIN))
        case TUNE.step:
            sweep = outputs_of(output, TUNE)
            return f"{sweep['trials']:.0f} trials, best val accuracy {sweep['best_accuracy']:.1%}"
        case EVALUATE.step:
            result = outputs_of(output, EVALUATE)
            interval = f"{result['accuracy_low']:.1%} to {result['accuracy_high']:.1%}"
            return f"accuracy {result['accuracy']:.1%} (95 % interval {interval})"
        case PREDICT.step:
            table = outputs_of(output, PREDICT)
            drift = table.get("drift", "no image to compare with those of the evaluation")
            return f"{table['rows']:,} rows, {table['unreadable']:,} unreadable; {drift}"
        case EXPORT.step:
            files = outputs_of(output, EXPORT)["formats"]
            formats = [word for file, word in FORMATS.items() if file in files]
            return f"{', '.join(formats[:-1])} and {formats[-1]} match the checkpoint"
        case GATE.step:
            return str(outputs_of(output, GATE)["reason"])
        case PUBLISH.step:
            model = outputs_of(output, PUBLISH)
            champion = ", the champion" if model["champion"] else ""
            return f"version {model['version']}{champion}"
        case TEARDOWN.step:
            return str(outputs_of(output, TEARDOWN)["Output"])
    return ""


def _training_detail(output: Path, values: TrainFigures) -> str:
    """Return steps, speed and accuracy of a training, as far as they are known."""
    training = TrainingProgress()
    training.update(_events(output))
    if training.stopped_early:
        parts = [f"{training.step} of {training.total} steps, stopped early"]
    else:
        parts = [f"{training.step or values['step']:.0f} steps"]
    if speed := images_per_second(output):
        parts.append(f"{speed:,.0f} images/s")
    accuracy = values.get("val_accuracy")
    if accuracy is not None:
        parts.append(f"val accuracy {accuracy:.1%}")
    return ", ".join(parts)


def images_per_second(output: Path) -> float:
    """Return the median over all training steps."""
    speeds = [event["images_per_s"] for event in _events(output) if event["event"] == "step"]
    return median_high(speeds) if speeds else 0.0


def collect_results(output: Path, seconds: float) -> dict[str, Any]:
    """Copy the results to the top of `output`, write summary.json, and return the summary.

    The bundle of the previous run is deleted only now, after a successful run.
    """
    synced = outputs_of(output, SYNC)
    evaluated = outputs_of(output, EVALUATE)
    verdict = outputs_of(output, GATE)
    pictures = {"report": ("gate", "gate_report"), "loss_curve": ("*", "loss_curve")}
    summary: dict[str, Any] = {
        "accuracy": evaluated["accuracy"],
        "seconds": round(seconds, 1),
        "images_per_second": round(images_per_second(output), 1),
        "ranks": next(
            (event["world_size"] for event in _events(output) if event["event"] == "start"),
            0,  # not trained here
        ),
        "files": synced["files"],
        "files_copied": synced["downloaded"],
        "blessed": verdict["blessed"],
        "reason": verdict["reason"],
        "verdict": verdict["title"],
        "expectation": verdict["words"],
        "cause": verdict["causes"],
        "warnings": evaluated["warnings"],
    }
    for name, (step, artifact) in pictures.items():
        target = output / f"{name}.html"
        target.unlink(missing_ok=True)
        for written in _written(output, f"*/**/{step}/{artifact}")[-1:]:
            shutil.copyfile(written, target)
            summary[name] = str(target)
    shutil.rmtree(output / "bundle", ignore_errors=True)
    shutil.copytree(outputs_of(output, EXPORT)["Output"], output / "bundle")
    summary["bundle"] = str(output / "bundle")
    summary |= _sweep_results(output)
    table = Path(evaluated["evaluation"]).with_name(LABELS_TO_CHECK)
    _keep_earlier(output / table.name, table.read_bytes())
    shutil.copyfile(table, output / table.name)
    with table.open(encoding="utf-8", newline="") as file:
        summary["labels_to_check"] = sum(1 for _ in Reader(file))
    if verdict["blessed"]:
        summary["uploaded_to"] = outputs_of(output, PUBLISH)["destination"]
    write_summary(output, summary)
    return summary


def has_model(output: Path) -> bool:
    """Return whether the steps of a run evaluated, judged and exported a model."""
    bundle = Path(str(outputs_of(output, EXPORT).get("Output", "")))
    steps = (SYNC.step, EVALUATE.step, GATE.step)
    return (bundle / MANIFEST).is_file() and all(outputs(output, step) for step in steps)


def _sweep_results(output: Path) -> dict[str, Any]:
    """Copy the report of a sweep to the top of `output`; return its path and the trials."""
    target = output / SWEEP_REPORT
    target.unlink(missing_ok=True)
    if not outputs(output, TUNE.step):
        return {}
    shutil.copyfile(_written(output, "*/**/tune/sweep_report")[-1], target)
    return {"sweep_report": str(target), **outputs_of(output, TUNE)["sweep"]}


def _sweep_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return the table of the trials of a sweep; [] for another run."""
    swept = Trials(trials=summary.get("trials", ()))
    return list(table_of_trials(swept.trials, shutil.get_terminal_size().columns))


def write_summary(output: Path, summary: Mapping[str, Any]) -> None:
    """Keep the summary of a run in its folder."""
    (output / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")


def _keep_earlier(table: Path, content: bytes) -> None:
    """Rename another table of an earlier run, which the user may have edited."""
    if not table.exists() or table.read_bytes() == content:
        return
    names = (table.with_stem(f"{table.stem}-{number}") for number in itertools.count(1))
    kept = next(name for name in names if not name.exists())
    table.rename(kept)
    say(f"note: {table.name} of the earlier run is now {shown(kept)}")


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return the summary as text, a line for each figure and file."""
    speed = f"{summary['images_per_second']:,.0f} images/s on {plural(summary['ranks'], 'rank')}"
    doubts = summary.get("labels_to_check")
    wrong = 1 - summary["accuracy"]
    table = Path(summary["report"]).with_name(LABELS_TO_CHECK)
    labels = f"none to check with a score from {wrong:.2f} on, the share of mistakes"
    if doubts:
        labels = f"{doubts} to check: {shown(table)} {SCORE}"
    lines = {
        "accuracy": f"{summary['accuracy']:.1%} of the validation images",
        "files": f"{summary['files']:,} in the dataset, {summary['files_copied']:,} copied",
        "speed": speed if summary["images_per_second"] else "",  # a script may not report it
        "verdict": summary["verdict"].lower(),
        "expect": summary["expectation"],
        "cause": summary["cause"],
        "bundle": shown(summary["bundle"]),
        "uploaded": summary.get("uploaded_to", ""),
        "report": shown(summary["report"]),
        "sweep": shown(summary["sweep_report"]) if "sweep_report" in summary else "",
        "labels": labels,
        "loss curve": shown(summary["loss_curve"]) if "loss_curve" in summary else "",
        "warning": summary["warnings"],
    }
    return facts(lines)


def example(output: Path) -> str:
    """Return the path of an image of the evaluation, quoted for a shell: the user's own, if any."""
    with (output / "bundle" / "predictions.csv").open(encoding="utf-8", newline="") as file:
        name = next(iter(Reader(file)))["path"]
    synced = outputs_of(output, SYNC)
    for folder in (Path(synced["source"]), Path(synced["path"])):
        for path in (folder / name, *folder.glob(f"*/{name}")):
            if path.is_file():
                return shown(path)
    return shown("picture.jpg")


def outputs(output: Path, step: str) -> dict[str, Any]:
    """Return outputs and artifact metadata of a step by name; in a loop of the newest iteration."""
    written = _written(output, f"*/**/{step}/executor_output.json")
    if not written:
        return {}
    document = json.loads(written[-1].read_text())
    values: dict[str, Any] = {}
    for artifacts in document.get("artifacts", {}).values():
        for artifact in artifacts["artifacts"]:
            values |= artifact.get("metadata", {})
    values |= document.get("parameterValues", {})
    return values


def outputs_of(output: Path, kind: StepOutputs[T]) -> T:
    """Return the outputs of a step of ours; without any key if it has not ended."""
    return cast("T", outputs(output, kind.step))


def _written(output: Path, pattern: str) -> list[Path]:
    """Return files of the steps, the newest last."""
    paths = (output / "artifacts").glob(pattern)
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns)


def _events(output: Path) -> list[dict[str, Any]]:
    """Return the training metrics, of a sweep those of its best trial."""
    task = Path(outputs_of(output, TUNE).get("run_dir", "")).name or "*"
    files = list(output.glob(f"work/*/{task}/metrics.jsonl"))
    return read_events(files[0]) if files else []


def run_and_print(run: Callable[[], tuple[Path, dict[str, Any]]], as_json: bool) -> None:
    """Print the summary that `run` returns with its folder, or as JSON with the rest on stderr."""
    elsewhere = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with elsewhere:
        output, summary = run()
    if as_json:
        click.echo(json.dumps(summary))
        return
    if "settings" in summary:  # nothing was trained
        text = yaml.safe_dump(summary["settings"], sort_keys=False, allow_unicode=True)
        click.echo(f"# the settings of this run, for -f FILE\n{in_short(text).rstrip()}")
        return
    if "accuracy" in summary:
        click.echo("\n" + "\n".join([*summary_lines(summary), *_sweep_lines(summary)]))
    elif "report" in summary:
        click.echo(f"\n  report      {shown(summary['report'])}")
    seconds = f"{summary['seconds']:.0f} seconds"
    click.echo(f"\n  {seconds}; the results are in {shown(output)}/")
    if "bundle" in summary:
        picture = example(output)
        click.echo(f"  try it: kfp-ddp predict {shown(summary['bundle'])} {picture}")
