"""Run pipelines on this machine: a training on photographs, or any compiled pipeline."""

import contextlib
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from kfp_ddp.checks.preflight import title
from kfp_ddp.core import machine
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.text import plural
from kfp_ddp.datasets.settings import options_of
from kfp_ddp.datasets.sync import sync
from kfp_ddp.evaluation.report_data import NOTES_VARIABLE
from kfp_ddp.local import engine, folder, results, survey
from kfp_ddp.local.display import say, shown
from kfp_ddp.models.weights_download import Start, find, is_path, is_per_node, obtain
from kfp_ddp.pipelines import NAMES
from kfp_ddp.pipelines.document import is_file, program_of, read
from kfp_ddp.pipelines.form import COMPILED, Form, Word, check_arguments, form_of, named_after
from kfp_ddp.plan.choice import Choice, Machine, Photographs, this_machine
from kfp_ddp.plan.settings import Run
from kfp_ddp.plan.sizing import choose_weights, sized, sweep_minutes
from kfp_ddp.plan.sweep import number_of
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

    def replaces(self, earlier: folder.LocalRun | None) -> bool:
        """Return whether a new run deletes the model of an `earlier` one of the same command."""
        return self.replace or (self.fresh and earlier is not None)


def execute(command: Command, pipeline: str = "", ranks: int = 0) -> tuple[Path, dict[str, Any]]:
    """Run a built-in pipeline, '' for train_resnet, or a compiled file; see `train` and `run`."""
    source, pipeline = program_of(command.source, pipeline)
    file = is_file(pipeline)
    name = pipeline.replace("-", "_") or "train_resnet"
    command = command._replace(source=source)
    if not file and name not in NAMES:
        raise InputError(f"with --local, --pipeline is one of {', '.join(NAMES)}")
    ours = name == "train_resnet"
    if ranks and not ours:
        raise InputError("--ranks is for train_resnet: set nproc_per_node of job in its place")
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
    arguments = form.read(command.file, command.words, local=True)
    source = survey.resolve_source(command.source)
    output = command.output and command.output.resolve()
    base = output or folder.RUNS.resolve()
    _check(arguments, ranks, source, base)
    identity = folder.identity_of(source=source, arguments=arguments, ranks=ranks)
    earlier = folder.unfinished(output, identity)

    arguments["training"] = {"on_bad_image": "skip", **arguments.get("training", {})}
    surveyed = survey.survey(source, arguments)
    photographs = surveyed.photographs
    computer = this_machine()
    choice, start = _choose(arguments, photographs, computer, ranks, command.check)
    name = named_after(source)
    everything = {"model_name": name, **choice.arguments, "source": source, "backend": "local"}
    checked = check_arguments(form.pipeline, everything)
    exclude = [*arguments.get("sync", {}).get("exclude", ()), *surveyed.excluded]
    if checked:
        if not checked.config.script:
            _check_network(checked.config, photographs, choice.ranks)
        if command.check:
            _check_as_steps(checked, folder.data_of(base), exclude)
    if command.check:
        _show(surveyed, computer, choice, start, complete=True)
        return Path(), _checked(surveyed, choice)

    everything["sync"] = _sync_settings({**everything.get("sync", {}), "exclude": exclude})
    settings = folder.identity_of(arguments=everything)
    environment = {
        "OMP_NUM_THREADS": str(machine.threads(choice.ranks)),
        NOTES_VARIABLE: "\n".join((*photographs.notes, ";".join(surveyed.left_out))),
    }
    interrupted = None if command.fresh else earlier
    if interrupted and (progress := interrupted.progress()):
        if _resumes(interrupted, progress, settings, everything):
            return interrupted.folder, engine.run(interrupted, started, everything, environment)
        interrupted = None
    if interrupted:  # without a checkpoint, so images may have changed
        say(f"resuming at the start in {shown(interrupted.folder)}; --fresh starts over")
        run = interrupted.replace(settings=settings)
    else:
        new = folder.LocalRun(identity=identity, settings=settings)
        run = folder.begin(new, output, name, command.replaces(earlier))
    _show(surveyed, computer, choice, start, complete=False)
    return run.folder, engine.run(run, started, everything, environment, photographs.notes)


def _choose(
    arguments: dict[str, Any], photographs: Photographs, computer: Machine, ranks: int, check: bool
) -> tuple[Choice, Start]:
    """Return the chosen settings and weights; with `check` the weights are not downloaded."""
    pretrained = arguments.get("pretrained", "auto")
    if is_path(pretrained):
        arguments = _with_network(arguments, pretrained)
    get = find if check else obtain
    return choose_weights(photographs, computer, arguments, ranks, get)


def _resumes(
    run: folder.LocalRun, progress: str, settings: str, arguments: Mapping[str, Any]
) -> bool:
    """Return whether a run continues at its checkpoint, and say it, or why it does not."""
    where = shown(run.folder)
    same = run.settings == settings and _is_unchanged(run, arguments)
    if same:
        say(f"resuming at {progress} in {where}; --fresh starts over")
        click.echo()
    else:
        say(
            f"the images or their settings have changed since the run in {where} stopped at "
            f"{progress}"
        )
    return same


def _show(
    surveyed: survey.Survey, computer: Machine, choice: Choice, start: Start, complete: bool
) -> None:
    """Print what will be trained, why, and on which images; an example of each if `complete`."""
    photographs = surveyed.photographs
    say(f"{photographs}; {computer}: {_title(choice)}")
    if choice.why:
        say(f"chosen for {choice.why}")
    _show_images(surveyed, complete, start.origin)
    click.echo()


def _show_images(surveyed: survey.Survey, complete: bool, origin: str = "") -> None:
    """Print the images of each class, and notes on them and the origin of the weights."""
    reading = surveyed.reading if complete else surveyed.reading[:1]
    for line in (*surveyed.table, *reading, *surveyed.left_out):
        say(line)
    for note in filter(None, (*surveyed.photographs.notes, origin)):
        say(f"note: {note}")


def _checked(surveyed: survey.Survey, choice: Choice) -> dict[str, Any]:
    """Return the result of `check`: the images, and the settings that are not empty."""
    photographs = surveyed.photographs
    settings = _not_empty(choice.arguments)
    return {
        "train": photographs.train,
        "val": photographs.val,
        "broken": surveyed.broken,
        "notes": photographs.notes,
        "settings": settings,
    }


def _check(arguments: dict[str, Any], ranks: int, source: str, target: Path) -> None:
    for name, why in _FIXED.items():
        if name in arguments or name in arguments.get("job", {}):
            raise InputError(f"{name} cannot be set: it {why}")
    if ranks and "nproc_per_node" in arguments.get("job", {}):
        raise InputError("nproc_per_node and --ranks are one setting: give one of them")
    if "://" in source:
        return
    images = Path(source).resolve()
    if images.is_relative_to(target) or target.is_relative_to(images):
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
    chosen = arguments.get("model", "auto") != "auto" or arguments["training"].get("script")
    if chosen or is_per_node(weights):
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
    # The networks of libraries are known to work, on more than one image.
    is_known = not config.model_code and micro > 1
    if is_known and not is_local:
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


def _survey(run: Run, arguments: Mapping[str, Any], show: bool) -> survey.Survey | None:
    """Return the images of a folder here, to show them or to check a network; None for others."""
    source = run.parameters.source
    is_needed = show or run.own_network
    if is_remote(source) or not is_needed:
        return None
    training = {"on_bad_image": run.config.on_bad_image, **arguments.get("training", {})}
    return survey.survey(source, {**arguments, "training": training})


def _check_weights(run: Run, surveyed: survey.Survey | None) -> None:
    """Raise the InputError of the evaluation for weights that do not fit the network."""
    checkpoint = run.parameters.checkpoint
    if is_remote(checkpoint):
        return
    if not run.own_network:
        if Path(checkpoint).is_file():
            raise InputError(
                f"checkpoint={checkpoint} is a file of weights: name its network, too, with "
                "--set model=NAME or --set model=net.py:build"
            )
        return
    from kfp_ddp.training import trained  # torch takes seconds

    given = tuple(run.measuring.get("classes", ()))
    number = surveyed.photographs.classes if surveyed else len(given)
    if number:
        of_images = tuple(map(str, range(number)))  # only their number matters
        trained.load(run.config, Path(checkpoint), given, lambda: of_images)


def _plan(
    run: Run | None, arguments: Mapping[str, Any], surveyed: survey.Survey | None
) -> dict[str, Any]:
    """Print what a run of a pipeline would do, and return it; None for one without our form."""
    plan: dict[str, Any] = {"settings": _not_empty(arguments)}
    if run is None:
        return plan
    if surveyed:
        say(f"{surveyed.photographs}; {this_machine()}")
        _show_images(surveyed, complete=True)
    run, lines = sized(run)
    plan["runs"] = title(run)
    for line in (plan["runs"], *lines):
        say(line)
    if run.sweep:
        minutes = sweep_minutes(run, run.sweep)
        plan |= {"trials": number_of(run.sweep), "minutes": round(minutes, 1)}
        about = f"about {max(1, round(minutes))} min" if minutes else "an unknown number of minutes"
        say(f"sweep: {plan['trials']} trials at most, {about} of training in all")
    click.echo()
    return plan


def _not_empty(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if value not in ("", {})}


def run(compiled: Path, command: Command) -> tuple[Path, dict[str, Any]]:
    """Run a compiled pipeline, and return its folder, and its name, duration and report.

    With `check`, return the working directory and what would run.
    """
    started = time.monotonic()
    pipeline = read(compiled)
    form = Form(pipeline)
    requested = form.read(command.file, command.words, local=True)
    fixed = _fixed_arguments(form, command.source)
    twice = [name for name in fixed if name in requested]
    if twice:
        raise InputError(f"{twice[0]} cannot be set: with --local it is {fixed[twice[0]]}")
    arguments = {**requested, **fixed}
    if form.subjects and "sync" in form.parameters:
        arguments["sync"] = _sync_settings(arguments.get("sync", {}))
    form.check_complete(arguments)
    checked = check_arguments(pipeline, arguments)
    surveyed = _survey(checked, arguments, command.check) if checked else None
    if checked:
        _check_weights(checked, surveyed)
    if command.check:
        return Path(), _plan(checked, arguments, surveyed)

    text = compiled.read_text(encoding="utf-8")
    output = command.output and command.output.resolve()
    identity = folder.identity_of(pipeline=text, arguments=arguments)
    earlier = folder.unfinished(output, identity)
    # The steps of a loop cannot be resumed.
    can_resume = not command.fresh and not engine.LOOP.search(text)
    if earlier and can_resume:
        say(f"resuming at {earlier.progress() or 'the start'}; --fresh starts over")
        run = earlier
    else:
        name = named_after(command.source or pipeline.name)
        new = folder.LocalRun(identity=identity)
        run = folder.begin(new, output, name, command.replaces(earlier))
    click.echo(f"{pipeline.name} on this machine\n")
    run = engine.execute(run, arguments, compiled, describe_step if form.subjects else _outputs)
    summary = {"pipeline": pipeline.name, **_results(run.folder, time.monotonic() - started)}
    results.write_summary(run.folder, summary)
    run.replace(complete=True).write()
    return run.folder, summary


def _fixed_arguments(form: Form, source: str) -> dict[str, Any]:
    """Return the arguments that --local and SOURCE give; raise InputError for a useless SOURCE."""
    fixed = {}
    if form.subjects and "backend" in form.parameters:
        fixed["backend"] = "local"
    if source:
        if "source" not in form.parameters:
            raise InputError(f"SOURCE cannot be used: {form.pipeline.name} has no parameter source")
        fixed["source"] = survey.resolve_source(source)
    return fixed


def _results(output: Path, seconds: float) -> dict[str, Any]:
    """Copy what a run has of a new model, or its report, to the top of `output`; return it."""
    if results.has_model(output):
        return results.collect_results(output, seconds)
    shutil.rmtree(output / "bundle", ignore_errors=True)
    return {"seconds": round(seconds, 1), **report(output)}


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
    values = []
    for name, value in results.outputs(output, step).items():
        if isinstance(value, int | float | str) and value != "":
            values.append(str(value) if name == "Output" else f"{name} {value}")
    return ", ".join(values)
