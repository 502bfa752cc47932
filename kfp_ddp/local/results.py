"""What is read back from a run: progress, a line for each step, the summary."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from kfp_ddp.components.shared.pictures import read_events
from kfp_ddp.local.screen import bar

EXCEPTION = re.compile(r"[\w.]+(Error|Exception): ")


def progress(output: Path) -> str:
    """The training step's progress: bar, step of steps, loss and images/s."""
    events = _events(output)
    total = next((e["steps_total"] for e in events if e["event"] == "start"), 0)
    steps = [e for e in events if e["event"] == "step"]
    if not steps:
        return "starting the ranks"
    last = steps[-1]
    return (
        f"{bar(last['step'], total)} step {last['step']}/{total}  "
        f"loss {last['loss']:.3f}  {last['images_per_s']:,.0f} images/s"
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
        case "dataset-volume":
            return "read in place: " + "/".join(Path(found["path"]).parts[-2:])
        case "train":
            return f"{found['step']:.0f} steps, {images_per_second(output):,.0f} images/s"
        case "evaluate":
            low, high = found["accuracy_low"], found["accuracy_high"]
            return f"accuracy {found['accuracy']:.1%} (95 % interval {low:.1%} to {high:.1%})"
        case "gate":
            return str(found["reason"])
        case "export":
            return "safetensors, ONNX and .pt2 agree with the checkpoint"
    return ""


def images_per_second(output: Path) -> float:
    """Median of the training steps that reported it, over all ranks."""
    speeds = sorted(e["images_per_s"] for e in _events(output) if e["event"] == "step")
    return speeds[len(speeds) // 2] if speeds else 0.0


def last_error(log: Path) -> str:
    """What the failed step said of it: its `error:` line, else its exception, else ''."""
    lines = [line.strip() for line in log.read_text().splitlines()]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    raised = [line for line in lines if EXCEPTION.match(line)]
    return next(iter(said[-1:] + raised[:1]), "")


def gather(output: Path, seconds: float) -> dict[str, Any]:
    """Copy what people look at to the top of `output`, write summary.json there, return it.

    A bundle of the run before goes only now, so that one that fails costs nobody a model.
    """
    synced, evaluated = outputs(output, "data-sync"), outputs(output, "evaluate")
    verdict = outputs(output, "gate")
    pictures = {"report": ("evaluate", "report"), "loss_curve": ("train", "loss_curve")}
    summary: dict[str, Any] = {
        "accuracy": evaluated["accuracy"],
        "seconds": round(seconds, 1),
        "images_per_second": round(images_per_second(output), 1),
        "files": synced["files"],
        "files_copied": synced["downloaded"],
        "blessed": verdict["blessed"],
        "reason": verdict["reason"],
    }
    for name, (step, artifact) in pictures.items():
        target = output / f"{name}.html"
        shutil.copyfile(_newest(output, f"*/{step}/{artifact}"), target)
        summary[name] = str(target)
    shutil.rmtree(output / "bundle", ignore_errors=True)
    if verdict["blessed"]:
        exported = outputs(output, "export")
        shutil.copytree(exported["bundle"], output / "bundle")
        summary["bundle"] = str(output / "bundle")
        summary["uploaded_to"] = exported["destination"]
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def outputs(output: Path, step: str) -> dict[str, Any]:
    """Parameters and artifact metadata that a step wrote, in one table by name."""
    document = json.loads(_newest(output, f"*/{step}/executor_output.json").read_text())
    found: dict[str, Any] = {}
    for artifacts in document.get("artifacts", {}).values():
        for artifact in artifacts["artifacts"]:
            found |= artifact.get("metadata", {})
    found |= document.get("parameterValues", {})
    return found


def _newest(output: Path, pattern: str) -> Path:
    return sorted((output / "artifacts").glob(pattern))[-1]


def _events(output: Path) -> list[dict[str, Any]]:
    """Metrics of the one run in the work folder."""
    files = list(output.glob("work/*/*/metrics.jsonl"))
    return read_events(files[0]) if files else []
