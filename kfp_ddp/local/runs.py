"""Run pipelines on this machine: a training on photographs, or any compiled pipeline."""

import contextlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kfp_ddp.checks.choice import Choice, this_machine
from kfp_ddp.checks.sizing import choose_weights
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import plural
from kfp_ddp.local import engine, results, survey
from kfp_ddp.models.initial_weights import is_path, network_in, obtain
from kfp_ddp.pipelines.document import read
from kfp_ddp.pipelines.form import Form, check_arguments, form_of, named_after

_FIXED = {
    "source": "is the argument SOURCE",
    "backend": "is local with --local",
    "nodes": "is 1 with --local",
    "gpus_per_node": "is what this machine has with --local",
}


def train(
    source: str, output: Path, words: Sequence[str], file: Path | None, ranks: int
) -> dict[str, Any]:
    """Run train_resnet on a source in the folder `output`, and return the summary.

    Args:
        source: Folder or URI of the images.
        output: A new or empty folder, or that of an earlier run.
        words: Settings, as `key=value`.
        file: A YAML file of settings, which words override; None for none.
        ranks: Number of processes; 0 to choose.

    Raises:
        KfpDdpError: Settings, source or output are invalid, or the pipeline failed.
    """
    started = time.monotonic()
    form = form_of("train_resnet")
    arguments = form.read(file, words)
    for name, why in _FIXED.items():
        if name in arguments:
            raise InputError(f"{name} cannot be set: it {why}")
    if ranks and "nproc_per_node" in arguments.get("job", {}):
        raise InputError("nproc_per_node and --ranks are one setting: give one of them")
    source = survey.located(source)
    if "://" not in source:
        _check_apart(Path(source), output)
    arguments["training"] = {"on_bad_image": "skip", **arguments.get("training", {})}
    surveyed = survey.look(source, arguments)
    photographs = surveyed.photographs
    computer = this_machine()
    pretrained = arguments.get("pretrained", "auto")
    if is_path(pretrained) and not network_in(pretrained) and "model" not in arguments:
        from kfp_ddp.training.initial_weights import network_of  # imports torch

        arguments["model"] = network_of(Path(pretrained)) or "auto"
    choice, start = choose_weights(photographs, computer, arguments, ranks, obtain)
    everything = {"model_name": named_after(source), **choice.arguments}
    everything |= {"source": source, "backend": "local"}
    check_arguments(form.pipeline, form.completed(everything))
    engine.prepare(output)
    click.echo(f"{photographs}; {computer}: {_title(choice)}")
    click.echo(f"chosen for {choice.why}" if choice.why else "")
    click.echo("\n".join(surveyed.lines))
    notes = (*photographs.notes, start.origin)
    click.echo("".join(f"note: {note}\n" for note in notes if note))
    threads = {"OMP_NUM_THREADS": str(max(1, computer.cores // choice.ranks))}
    return engine.run(output, everything, threads, started)


def _check_apart(source: Path, output: Path) -> None:
    """Check that neither source nor output contains the other."""
    folder = source.resolve()
    if folder.is_relative_to(output) or output.is_relative_to(folder):
        raise InputError(
            f"--output {output} and the photographs in {folder} contain each other; "
            "give another output folder"
        )


def _title(choice: Choice) -> str:
    """Return what will be trained, and the estimated duration, in one line."""
    arguments = choice.arguments
    size = arguments["training"].get("image_size")
    parts = [
        f"{arguments.get('model', 'the model')} of recipe {recipe}"
        if (recipe := arguments.get("recipe", "none")) != "none"
        else str(arguments["model"])
    ]
    parts[0] += f" at {size} px" if size else ""
    if epochs := arguments.get("epochs"):
        parts.append(plural(epochs, "epoch"))
    if batch := arguments["training"].get("batch_size"):
        parts.append(f"batch {batch}")
    parts.append(results.ranks(choice.ranks))
    if choice.minutes:
        parts.append(f"about {max(1, round(choice.minutes))} min of training")
    return ", ".join(parts)


def run(
    compiled: Path, source: str, output: Path, words: Sequence[str], file: Path | None
) -> dict[str, Any]:
    """Run a compiled pipeline in the folder `output`, and return its name, duration and report.

    Args:
        compiled: YAML of the pipeline.
        source: Its parameter source; '' for none.
        output: A new or empty folder, or that of an earlier run.
        words: Settings, as `key=value`.
        file: A YAML file of settings, which words override; None for none.

    Raises:
        KfpDdpError: File, settings or output are invalid, or the pipeline failed.
    """
    started = time.monotonic()
    pipeline = read(compiled)
    form = Form(pipeline)
    requested = form.read(file, words)
    fixed = {"backend": "local"} if form.subjects and "backend" in form.parameters else {}
    if source:
        if "source" not in form.parameters:
            raise InputError(f"SOURCE cannot be used: {pipeline.name} has no parameter source")
        fixed["source"] = survey.located(source)
    if twice := [name for name in fixed if name in requested]:
        raise InputError(f"{twice[0]} cannot be set: with --local it is {fixed[twice[0]]}")
    arguments = form.completed({**requested, **fixed})
    check_arguments(pipeline, arguments)
    engine.prepare(output)
    click.echo(f"{pipeline.name} on this machine\n")
    engine.execute(output, compiled, arguments, {}, describe_step if form.subjects else _outputs)
    seconds = round(time.monotonic() - started, 1)
    return {"pipeline": pipeline.name, "seconds": seconds, **report(output)}


def report(output: Path) -> dict[str, str]:
    """Copy the gate's report to the top of `output`, and return its path, if there is one."""
    target = output / "report.html"
    target.unlink(missing_ok=True)
    for path in output.glob("artifacts/*/gate/gate_report"):
        shutil.copyfile(path, target)
    return {"report": str(target)} if target.exists() else {}


def describe_step(output: Path, step: str) -> str:
    """Return the summary of a step with our component, otherwise its outputs."""
    with contextlib.suppress(LookupError):  # a user's step may have the same name
        if detail := results.detail(output, step):
            return detail
    return _outputs(output, step)


def _outputs(output: Path, step: str) -> str:
    """Return the outputs of a step in one line."""
    values = results.outputs(output, step)
    short = {name: value for name, value in values.items() if isinstance(value, int | float | str)}
    return ", ".join(str(v) if n == "Output" else f"{n} {v}" for n, v in short.items() if v != "")
