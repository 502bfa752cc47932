"""`kfp-ddp run` and `demo`: train on images, or run any pipeline, here or on KFP."""

import itertools
from pathlib import Path
from typing import Any

import click

from kfp_ddp.cli.options import (
    AS_JSON,
    FOLDER,
    SET,
    SETTINGS_FILE,
    configured,
    connected,
    echo,
    echo_json,
    inputs,
    is_on_command_line,
    require,
    show,
    text_option,
)
from kfp_ddp.core.config import Connection
from kfp_ddp.core.container_images import SETTINGS
from kfp_ddp.core.errors import InputError

RUN_SETTINGS = ("experiment", "pipeline_root", "service_account")
SHORTCUTS = ("model", "epochs", "batch_size")
"""Settings that are options, too."""
LOCAL_ONLY = ("output", "ranks", "fresh", "replace", "check")
EVERYWHERE = (
    *("source", "local", "pipeline", "words", *SHORTCUTS),
    *("file", "destination", "dry_run", "as_json"),
)
"""Options with or without --local; all others but those above are for a run on KFP."""


class RunCommand(click.Command):
    """Names the option or the setting that an unknown option means."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raise UsageError for an unknown option, with the one that is meant."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            meant = self._meant(error.option_name)
            hint = f"; did you mean {meant}?" if meant else ""
            raise click.UsageError(f"There is no option {error.option_name}{hint}", ctx) from None

    def _meant(self, unknown: str) -> str:
        """Return the option or the setting with a name near to an unknown one; '' for none."""
        from kfp_ddp.core.settings import nearest

        options: set[str] = set()
        for parameter in self.params:
            flags = [flag for flag in parameter.opts if flag.startswith("--")]
            options |= {flag[2:].replace("-", "_") for flag in flags}
        key = unknown.lstrip("-").replace("-", "_")
        near = nearest(key, sorted(options | _settings()))
        if near in options:
            return f"--{near.replace('_', '-')}"
        return f"--set {near}=VALUE" if near else ""


def _settings() -> set[str]:
    """Return the names of all settings of a run."""
    from kfp_ddp.plan.form import MODELS, SUBJECTS

    models = itertools.chain(MODELS, *SUBJECTS.values())
    fields = {name for model in models for name in model.model_fields}
    return fields - SUBJECTS.keys()


@click.command("run", cls=RunCommand)
@click.argument("source", default="", metavar="[SOURCE|FILE]")
@click.option("--local", is_flag=True, help="Run on this machine, without a cluster.")
@text_option(
    "--pipeline",
    help="Pipeline to run: a built-in one, such as retrain or sweep, or an uploaded one, as NAME "
    "for its newest version or NAME@VERSION.  [default: train_resnet]",
)
@SET
@click.option("--model", metavar="NAME", help="As --set model=NAME.")
@click.option("--epochs", metavar="N", help="As --set epochs=N.")
@click.option("--batch-size", metavar="N", help="As --set batch_size=N.")
@SETTINGS_FILE
@click.option(*("--gpus", "--gpus-per-node", "gpus"), type=click.IntRange(0), help="GPUs per node.")
@text_option("--name", help="Name of the run.  [default: from model and time]")
@click.option(
    "--follow", is_flag=True, help="Show its steps until it ends; exit code 1 if it failed."
)
@click.option(
    "--wait", is_flag=True, help="Wait without output until it ends; exit code 1 if it failed."
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check the input and print what would run, without sending it; with --local as --check.",
)
@click.option(
    *("--output", "-o"),
    type=FOLDER,
    help="With --local, a folder for the copied data and the results.  [default: a new one in "
    "run-output, with the name of SOURCE, and a link run-output/latest to it]",
)
@click.option(
    "--fresh", is_flag=True, help="With --local, start over where the same command was interrupted."
)
@click.option(
    "--replace", is_flag=True, help="With --local, delete the model of an earlier run in --output."
)
@click.option(
    "--check",
    is_flag=True,
    help="With --local, show the images of each class, what cannot be read and the chosen "
    "settings, of a sweep the number of trials and the minutes, without training.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    help="With --local, number of training processes.  [default: by cores]",
)
@AS_JSON
@configured(*RUN_SETTINGS, "destination", *SETTINGS)
@connected
def run(connection: Connection, source: str, local: bool, **options: Any) -> None:
    """Train on SOURCE: gs://, s3://, az:// or hf://, with a folder for each class, or run FILE.

    With --local, SOURCE may be a local folder, and the defaults of settings depend on images,
    cores, memory and GPU. FILE is the YAML of any compiled pipeline, whose parameters are set by
    --set and -f. The input is checked before it is sent. The run continues when this command is
    interrupted.

    \b
    kfp-ddp run ./photos --local --set epochs=20 --set model=resnet18
    kfp-ddp run gs://bucket/flowers --gpus 1 --set epochs=30 --follow
    kfp-ddp run my_pipeline.yaml --set rounds=3
    kfp-ddp run gs://bucket/flowers --pipeline retrain --dry-run
    """
    for name in SHORTCUTS:
        value = options.pop(name)
        if value is not None:
            options["words"] = (*options["words"], f"{name}={value}")
    if not source and not options["pipeline"]:
        raise click.UsageError("Give a SOURCE, a FILE or --pipeline.")
    for name in filter(is_on_command_line, click.get_current_context().params):
        _check_place(name, local)
    if not local:
        _run_on_kfp(connection, source, options)
        return
    require("local")
    from kfp_ddp.local import runs
    from kfp_ddp.local.results import run_and_print

    if is_on_command_line("destination"):
        options["words"] = (*options["words"], f"destination={options['destination']}")
    options["check"] |= options["dry_run"]
    command = runs.Command(source, **{name: options[name] for name in runs.Command._fields[1:]})
    pipeline = options["pipeline"]
    ranks = options["ranks"] or 0
    run_and_print(lambda: runs.execute(command, pipeline, ranks), options["as_json"])


def _check_place(name: str, local: bool) -> None:
    """Raise InputError for an option that has no effect here, or on KFP."""
    flag = f"--{name.replace('_', '-')}"
    if name in LOCAL_ONLY and not local:
        raise InputError(f"{flag} is for a run with --local")
    if local and name not in (*EVERYWHERE, *LOCAL_ONLY):
        raise InputError(f"{flag} is for a run on KFP: leave it out with --local")


@click.command("demo")
@click.option(
    *("--output", "-o"),
    type=FOLDER,
    default=Path("demo-output"),
    help="Folder for the bucket, the synced data and the results.",
)
@click.option("--ranks", type=click.IntRange(1), default=2, help="Number of training processes.")
@click.option("--epochs", type=click.IntRange(1), help="Number of epochs.")
@AS_JSON
def demo(output: Path, ranks: int, epochs: int | None, as_json: bool) -> None:
    """Run bucket, sync, DDP training, evaluation, gate and export locally, without a cluster."""
    require("demo")
    from kfp_ddp.local.demo import run
    from kfp_ddp.local.results import run_and_print

    def begin() -> tuple[Path, dict[str, Any]]:
        echo(f"train_resnet.yaml through kfp.local, {ranks} ranks on this machine")
        return output, run(output.resolve(), ranks, {} if epochs is None else {"epochs": epochs})

    run_and_print(begin, as_json)
    if not as_json:
        echo("  with your images, a folder for each class: kfp-ddp run ./photos --local")


def _run_on_kfp(connection: Connection, source: str, options: dict[str, Any]) -> None:
    import yaml

    from kfp_ddp.client.api import Client
    from kfp_ddp.client.run.follow import check_success, until_over
    from kfp_ddp.core.packed import in_short

    as_json = options["as_json"]
    waits = options["follow"] or options["wait"]
    settings = {name: options[name] for name in (*RUN_SETTINGS, "destination", *SETTINGS)}
    with Client(connection=connection, **settings) as client:
        request = client.plan(source, options["pipeline"], options["name"], inputs(options))
        if options["dry_run"]:
            preview = request.preview()
            text = in_short(yaml.safe_dump(preview, sort_keys=False, allow_unicode=True))
            show(as_json, preview, *text.splitlines())
            return
        run = client.send(request).info
        if client.finder.client.new_experiment not in ("", "Default"):
            echo(f"the experiment {client.finder.client.new_experiment} is new", err=True)
        echo(f"started {request.name}: {run.page or run.id}", err=as_json)
        if waits:
            run = until_over(client.finder, run, options["wait"], as_json)
        elif not as_json:
            echo(f"progress: kfp-ddp status {run.word} --follow")
        if as_json:
            state = {"run_id": run.id, "state": run.state, "page": run.page}
            echo_json({**state, **request.document()})
        if waits:
            check_success(run)
