"""What is read back from a run: progress, a line for each step, the summary."""

import csv
import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kfp_ddp.core.step import last_error as error_in
from kfp_ddp.jobs.progress import TrainingProgress, clock
from kfp_ddp.local.screen import bar
from kfp_ddp.report.events import read_events

LOG = "pipeline.log"
STARTED = re.compile(r"Executing task '([^']+)'")
ENDED = re.compile(r"Task '([^']+)' finished with status (\w+)")
"""Lines of that log; it is read where psutil, which a run needs, may not be."""
FORMATS = {"model.safetensors": "safetensors", "model.onnx": "ONNX", "model.pt2": ".pt2"}


def progress(output: Path) -> str:
    """The training step's progress: bar, step of steps, loss, images/s and the time left."""
    told = TrainingProgress()
    told.update(_events(output))
    if told.last is None:
        return "starting the ranks"
    step, left = int(told.last["step"]), told.seconds_left()
    return (
        f"{bar(step, told.total, width=10)} step {step}/{told.total}  "
        f"loss {told.last['loss']:.3f}  {told.last['images_per_s']:,.0f} images/s"
        f"{'' if left is None else f'  {clock(left)} left'}"
    )


def detail(output: Path, step: str) -> str:
    """What a step that ended well says for itself, from the outputs it wrote."""
    found = outputs(output, step)
    match step:
        case "preflight":
            return str(found["what"])
        case "teardown":
            return str(found["Output"])
        case "data-sync":
            copied = f"{found['downloaded']:,} copied" if found["downloaded"] else "none copied"
            return f"{found['files']:,} files verified, {copied}, version {found['digest'][:12]}"
        case "changes":
            return str(found["reason"])
        case "dataset-volume":
            return "read in place: " + "/".join(Path(found["path"]).parts[-2:])
        case "train":
            speed = images_per_second(output)
            return f"{found['step']:.0f} steps" + (f", {speed:,.0f} images/s" if speed else "")
        case "evaluate":
            low, high = found["accuracy_low"], found["accuracy_high"]
            return f"accuracy {found['accuracy']:.1%} (95 % interval {low:.1%} to {high:.1%})"
        case "gate":
            return str(found["reason"])
        case "export":
            formats = [word for file, word in FORMATS.items() if file in found["formats"]]
            return f"{', '.join(formats[:-1])} and {formats[-1]} agree with the checkpoint"
        case "publish":
            return f"version {found['version']}" + (", the champion" if found["champion"] else "")
    return ""


def images_per_second(output: Path) -> float:
    """Median of the training steps that reported it, over all ranks."""
    speeds = sorted(e["images_per_s"] for e in _events(output) if e["event"] == "step")
    return speeds[len(speeds) // 2] if speeds else 0.0


def last_error(log: Path) -> str:
    """What the failed step said of it; '' for nothing."""
    return error_in(log.read_text())


def gather(output: Path, seconds: float) -> dict[str, Any]:
    """Copy what people look at to the top of `output`, write summary.json there, return it.

    A bundle of the run before goes only now, so that one that fails costs nobody a model.
    """
    synced, evaluated = outputs(output, "data-sync"), outputs(output, "evaluate")
    verdict = outputs(output, "gate")
    pictures = {"report": ("gate", "gate_report"), "loss_curve": ("train", "loss_curve")}
    summary: dict[str, Any] = {
        "accuracy": evaluated["accuracy"],
        "seconds": round(seconds, 1),
        "images_per_second": round(images_per_second(output), 1),
        "ranks": next(e["world_size"] for e in _events(output) if e["event"] == "start"),
        "files": synced["files"],
        "files_copied": synced["downloaded"],
        "blessed": verdict["blessed"],
        "reason": verdict["reason"],
    }
    for name, (step, artifact) in pictures.items():
        target = output / f"{name}.html"
        shutil.copyfile(_written(output, f"*/{step}/{artifact}")[-1], target)
        summary[name] = str(target)
    shutil.rmtree(output / "bundle", ignore_errors=True)
    if verdict["blessed"]:
        shutil.copytree(outputs(output, "export")["Output"], output / "bundle")
        summary["bundle"] = str(output / "bundle")
        summary["uploaded_to"] = outputs(output, "publish")["destination"]
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def told(summary: Mapping[str, Any]) -> list[str]:
    """The summary for people: a line for each of its figures and files."""
    speed = f"{summary['images_per_second']:,.0f} images/s on {ranks(summary['ranks'])}"
    lines = {
        "accuracy": f"{summary['accuracy']:.1%} of the validation images",
        "files": f"{summary['files']:,} in the dataset, {summary['files_copied']:,} copied",
        "speed": speed if summary["images_per_second"] else "",  # a script need not tell it
        "bundle": shown(summary["bundle"]) if summary["blessed"] else summary["reason"],
        "uploaded": summary.get("uploaded_to", ""),
        "report": shown(summary["report"]),
        "loss curve": shown(summary["loss_curve"]),
    }
    return [f"  {name:<12}{value}" for name, value in lines.items() if value]


def ranks(number: int) -> str:
    """So many processes of a training, in words."""
    return f"{number} rank{'s' if number > 1 else ''}"


def shown(path: str | Path) -> str:
    """The path as a person would type it from here."""
    here = Path.cwd()
    full = Path(os.path.abspath(path))
    return shlex.quote(str(full.relative_to(here) if full.is_relative_to(here) else full))


def example(output: Path) -> str:
    """One of the images that an exported model was evaluated on, as a person would type it."""
    with (output / "bundle" / "predictions.csv").open(encoding="utf-8", newline="") as file:
        name = next(csv.DictReader(file))["path"]
    data = output / "data" / "current"
    found = next((path for path in (data / name, *data.glob(f"*/{name}")) if path.is_file()), None)
    return shown(found) if found else "picture.jpg"


def outputs(output: Path, step: str) -> dict[str, Any]:
    """Parameters and artifact metadata that a step wrote, in one table by name.

    Those of a loop lie a folder deeper, that of their iteration; then the newest tells.
    """
    found: dict[str, Any] = {}
    written = _written(output, f"*/**/{step}/executor_output.json")
    document = json.loads(written[-1].read_text()) if written else {}
    for artifacts in document.get("artifacts", {}).values():
        for artifact in artifacts["artifacts"]:
            found |= artifact.get("metadata", {})
    found |= document.get("parameterValues", {})
    return found


def _written(output: Path, pattern: str) -> list[Path]:
    """Those of the steps' files, the newest at the end."""
    found = (output / "artifacts").glob(pattern)
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def _events(output: Path) -> list[dict[str, Any]]:
    """Metrics of the one run in the work folder."""
    files = list(output.glob("work/*/*/metrics.jsonl"))
    return read_events(files[0]) if files else []
