"""Run pipelines on this machine: a training on photographs, or any compiled pipeline."""

import contextlib
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from kfp_ddp.core import machine
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.text import plural
from kfp_ddp.datasets.settings import options_of
from kfp_ddp.datasets.sync import sync
from kfp_ddp.evaluation.report_data import NOTES_VARIABLE
from kfp_ddp.local import engine, folder, results, survey
from kfp_ddp.local.results import say, shown
from kfp_ddp.models.weights_download import find, is_path, is_per_node, obtain
from kfp_ddp.pipelines import NAMES
from kfp_ddp.pipelines.document import is_file, program_of, read
from kfp_ddp.pipelines.form import COMPILED, Form, Word, check_arguments, form_of, named_after
from kfp_ddp.plan.choice import Choice, Photographs, this_machine
from kfp_ddp.plan.settings import Run
from kfp_ddp.plan.sizing import choose_weights
from kfp_ddp.training.spec.batches import divide
from kfp_ddp.training.spec.config import TrainConfig

_FIXED = {
    "source": "is the argument SOURCE",
    "backend": "is local with --local",
    "nodes": "is 1 with --local",
    "gpus_per_node": "is what this machine has with --local",
    "evaluate_backend": "is local with --local",
}


class Command(NamedTuple):
    """What a command line requests of a local run."""

    source: str
    """Folder or URI of the images; '' for none."""
    output: Path | None = None
    """The folder; None for a new one below `folder.RUNS`."""
    words: Sequence[Word] = ()
    """Settings."""
    file: Path | None = None
    """A YAML file of settings, which words override."""
    fresh: bool = False
    """Whether to start over where the same command was interrupted."""
    replace: bool = False
    """Whether to delete an earlier model in `output`."""
    check: bool = False
    """Whether to only show the images and the chosen settings."""


def execute(command: Command, pipeline: str = "", ranks: int = 0) -> tuple[Path, dict[str, Any]]:
    """Run a built-in pipeline, '' for train_resnet, or a compiled file; see `train` and `run`."""
    source, pipeline = program_of(command.source, pipeline)
    file, name = is_file(pipeline), pipeline.replace("-", "_") or "train_resnet"
    command = command._replace(source=source)
    if not file and name not in NAMES:
        raise InputError(f"with --local, --pipeline is one of {', '.join(NAMES)}")
    ours = name == "train_resnet"
    for option, value in (("ranks", ranks), ("check", command.check)):
        if value and not ours:
            raise InputError(f"--{option} is for train_resnet: leave it out")
    if command.replace and not command.output:
        raise InputError("--replace is for --output: without it each run has its own folder")
    if ours:
        return train(command, ranks)
    return run(Path(pipeline) if file else COMPILED / f"{name}.yaml", command)


def train(command: Command, ranks: int = 0) -> tuple[Path, dict[str, Any]]:
    """Run train_resnet on a source, and return its folder and the summary.

    With `check`, return the working directory and what would be trained on. Raise KfpDdpError.
    """
    started = time.monotonic()
    form = form_of("train_resnet")
    arguments = form.read(command.file, command.words)
    source = survey.resolve_source(command.source)
    output = command.output and command.output.resolve()
    _check(arguments, ranks, source, output or folder.RUNS.resolve())
    identity = folder.identity_of(source=source, arguments=arguments, ranks=ranks)
    run = folder.unfinished(output, identity)
    interrupted = None if command.fresh or command.check else run
    replace = command.replace or (command.fresh and run is not None)
    arguments["training"] = {"on_bad_image": "skip", **arguments.get("training", {})}
    surveyed, computer = survey.survey(source, arguments), this_machine()
    options = arguments.get("sync", {})
    exclude = [*options.get("exclude", ()), *surveyed.excluded]
    photographs = surveyed.photographs
    pretrained = arguments.get("pretrained", "auto")
    requested = _with_network(arguments, pretrained) if is_path(pretrained) else arguments
    get = find if command.check else obtain
    choice, start = choose_weights(photographs, computer, requested, ranks, get)
    name = named_after(source)
    everything = {"model_name": name, **choice.arguments, "source": source, "backend": "local"}
    checked = check_arguments(form.pipeline, everything)
    if checked and not checked.config.script:
        _check_network(checked.config, photographs, choice.ranks)
    everything["sync"] = _sync_settings({**everything.get("sync", {}), "exclude": exclude})
    if checked and command.check:
        _check_as_steps(checked, folder.data_of(output or folder.RUNS.resolve()), exclude)
    environment = {
        "OMP_NUM_THREADS": str(machine.threads(choice.ranks)),
        NOTES_VARIABLE: "\n".join((*photographs.notes, ";".join(surveyed.left_out))),
    }
    settings = folder.identity_of(arguments=everything)
    if interrupted and (at := interrupted.progress()):
        where = shown(interrupted.folder)
        if interrupted.settings == settings and _is_unchanged(interrupted, everything):
            say(f"resuming at {at} in {where}; --fresh starts over")
            click.echo()
            return interrupted.folder, engine.run(interrupted, started, everything, environment)
        say(f"the images or their settings have changed since the run in {where} stopped at {at}")
        interrupted = None
    if interrupted:  # without a checkpoint, so images may have changed
        say(f"resuming at the start in {shown(interrupted.folder)}; --fresh starts over")
        run = interrupted.replace(settings=settings)
    elif not command.check:
        new = folder.LocalRun(identity=identity, settings=settings)
        run = folder.begin(new, output, name, replace)
    say(f"{photographs}; {computer}: {_title(choice)}")
    if choice.why:
        say(f"chosen for {choice.why}")
    reading = surveyed.reading if command.check else surveyed.reading[:1]
    for line in (*surveyed.table, *reading, *surveyed.left_out):
        say(line)
    for note in filter(None, (*photographs.notes, start.origin)):
        say(f"note: {note}")
    click.echo()
    if run is None or command.check:
        given = {key: value for key, value in choice.arguments.items() if value not in ("", {})}
        about = {"train": photographs.train, "val": photographs.val, "broken": surveyed.broken}
        return Path(), {**about, "notes": photographs.notes, "settings": given}
    return run.folder, engine.run(run, started, everything, environment, photographs.notes)


def _check(arguments: dict[str, Any], ranks: int, source: str, target: Path) -> None:
    for name, why in _FIXED.items():
        if name in arguments or name in arguments.get("job", {}):
            raise InputError(f"{name} cannot be set: it {why}")
    if ranks and "nproc_per_node" in arguments.get("job", {}):
        raise InputError("nproc_per_node and --ranks are one setting: give one of them")
    images = Path(source).resolve()
    if "://" not in source and (images.is_relative_to(target) or target.is_relative_to(images)):
        raise InputError(
            f"--output {target} and the photographs in {images} contain each other; "
            "give another output folder"
        )


def _check_as_steps(run: Run, data: Path, exclude: list[str]) -> None:
    """Raise the KfpDdpError of the run's preflight or sync, which read what these read."""
    from kfp_ddp.checks import preflight  # the run has a process for it

    for check in preflight.CHECKS:
        check(run)
    if run.champion != run.parameters.exports and not is_remote(run.champion):
        preflight.check_champion(run, here=True)
    options = {**run.sync, "exclude": exclude, "dry_run": True}
    result = sync(run.parameters.source, data, options_of(run.dataset.dataset, options))
    if result.refusal:
        raise InputError(result.refusal)


def _with_network(arguments: dict[str, Any], weights: str) -> dict[str, Any]:
    """Return the arguments with the network of a file of weights, where no model is set.

    Raise InputError if the file is missing, cannot be read, or does not name the network.
    """
    path = Path(weights)
    if not path.exists():
        raise InputError(
            f"there is no file {weights}: give pretrained true (weights of ImageNet), auto, false, "
            "a file or an address"
        )
    own = arguments.get("model", "auto") != "auto"
    if own or is_per_node(weights) or arguments["training"].get("script"):
        return arguments
    from kfp_ddp.training.state.initial_weights import network_of  # torch takes seconds

    if not (network := network_of(path)):
        raise InputError(f"the network of {weights} is not known: name it with --set model=NAME")
    return {**arguments, "model": network}


def _check_network(config: TrainConfig, photographs: Photographs, ranks: int) -> None:
    """Raise the InputError of the training for its batch, or for weights that do not fit."""
    batch, micro = divide(config, photographs.train, ranks, before=None)
    pretrained = config.pretrained
    is_local = is_path(pretrained) and not is_per_node(pretrained)
    if config.model_code or (micro > 1 and not is_local):
        return
    from kfp_ddp.training.prepare import check_network  # torch takes seconds

    known = {"batch_size": batch, "micro_batch_size": micro, "resume": "never"}
    known["pretrained"] = pretrained if is_local else "false"
    classes = tuple(map(str, range(photographs.classes)))  # only their number matters
    check_network(config.model_copy(update=known), classes)


def _sync_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the sync: sizes and times of the files are compared, not names alone.

    Versions share unchanged files, so a program that changes one in place changes all.
    """
    return {"verify": "quick", **given}


def _is_unchanged(run: folder.LocalRun, arguments: Mapping[str, Any]) -> bool:
    """Return whether the source, without what is excluded now, is what a run was trained on."""
    options = {**arguments["sync"], "dry_run": True}
    digest = sync(arguments["source"], run.data, options_of("", options)).digest
    return digest.startswith(run.version())


def _title(choice: Choice) -> str:
    """Return what will be trained, and the estimated duration, in one line."""
    arguments = choice.arguments
    size = arguments["training"].get("image_size")
    title = str(arguments.get("model", "the model"))
    if (recipe := arguments.get("recipe", "none")) != "none":
        title += f" of recipe {recipe}"
    parts = [f"{title} at {size} px" if size else title]
    if epochs := arguments.get("epochs"):
        parts.append(plural(epochs, "epoch"))
    if batch := arguments["training"].get("batch_size"):
        parts.append(f"batch {batch}")
    parts.append(plural(choice.ranks, "rank"))
    if choice.minutes:
        parts.append(f"about {max(1, round(choice.minutes))} min of training")
    return ", ".join(parts)


def run(compiled: Path, command: Command) -> tuple[Path, dict[str, Any]]:
    """Run a compiled pipeline, and return its folder, and its name, duration and report."""
    started = time.monotonic()
    pipeline = read(compiled)
    form = Form(pipeline)
    requested = form.read(command.file, command.words)
    fixed = {"backend": "local"} if form.subjects and "backend" in form.parameters else {}
    if command.source:
        if "source" not in form.parameters:
            raise InputError(f"SOURCE cannot be used: {pipeline.name} has no parameter source")
        fixed["source"] = survey.resolve_source(command.source)
    if twice := [name for name in fixed if name in requested]:
        raise InputError(f"{twice[0]} cannot be set: with --local it is {fixed[twice[0]]}")
    arguments = {**requested, **fixed}
    if form.subjects and "sync" in form.parameters:
        arguments["sync"] = _sync_settings(arguments.get("sync", {}))
    form.check_complete(arguments)
    check_arguments(pipeline, arguments)
    text, output = compiled.read_text(encoding="utf-8"), command.output and command.output.resolve()
    identity = folder.identity_of(pipeline=text, arguments=arguments)
    one = folder.unfinished(output, identity)
    if one is not None and not command.fresh and not engine.LOOP.search(text):
        say(f"resuming at {one.progress() or 'the start'}; --fresh starts over")
    else:
        name = named_after(command.source or pipeline.name)
        replace = command.replace or (command.fresh and one is not None)
        one = folder.begin(folder.LocalRun(identity=identity), output, name, replace)
    click.echo(f"{pipeline.name} on this machine\n")
    one = engine.execute(one, arguments, compiled, describe_step if form.subjects else _outputs)
    seconds = round(time.monotonic() - started, 1)
    summary = {"pipeline": pipeline.name, "seconds": seconds, **report(one.folder)}
    one.replace(complete=True).write()
    return one.folder, summary


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
