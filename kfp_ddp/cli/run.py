"""`kfp-ddp run`: the pipeline on photographs of one's own, here or on KFP."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kfp_ddp.cli.options import AS_JSON, configured, connected, typed
from kfp_ddp.core.config import Connection

if TYPE_CHECKING:
    from kfp_ddp.pipelines.document import Document

OF_THE_RUN = ("experiment", "pipeline_root", "service_account")
OF_THE_IMAGES = ("registry", "launcher_image", "trainer_image")
HERE = ("output", "ranks")
ON_KFP = ("gpus", "name", "follow", "wait", "dry_run")


@click.command("run")
@click.argument("source", default="", metavar="[SOURCE|FILE]")
@click.option("--local", is_flag=True, help="Run on this machine, without a cluster.")
@click.option(
    "--pipeline",
    default="",
    help="Pipeline to run: one of ours, such as retrain or sweep, or one that was uploaded, as "
    "NAME for its newest version or NAME@VERSION.  [default: train_resnet]",
)
@click.option(
    *("--set", "words"),
    multiple=True,
    metavar="KEY=VALUE",
    help="A parameter of the pipeline or a setting in it, such as epochs=10 or precision=bf16. "
    "May be repeated.",
)
@click.option(
    *("--file", "-f"),
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML file of such settings, under those of --set.",
)
@click.option(
    *("--gpus", "--gpus-per-node", "gpus"), type=click.IntRange(0), help="GPUs of each node."
)
@click.option("--name", default="", help="Name of the run.  [default: by model and time]")
@click.option(
    "--follow", is_flag=True, help="Show its steps until it ends; exit code 1 if it failed."
)
@click.option(
    "--wait", is_flag=True, help="Wait in silence until it ends; exit code 1 if it failed."
)
@click.option("--dry-run", is_flag=True, help="Check all and print what would be sent.")
@click.option(
    *("--output", "-o"),
    type=click.Path(path_type=Path, file_okay=False),
    help="With --local, folder for the copied data and the results: a new one, or that of an "
    "earlier run.  [default: run-output]",
)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    help="With --local, processes that train.  [default: by cores]",
)
@AS_JSON
@configured(*OF_THE_RUN, "destination", *OF_THE_IMAGES)
@connected
def command(connection: Connection, source: str, local: bool, **options: Any) -> None:
    """Train on SOURCE: gs://, s3://, az:// or hf://, with a folder for each class, or run FILE.

    With --local SOURCE may be a folder of photographs, and what nobody sets is chosen by what is
    there: images, cores, memory and GPU. FILE is the YAML of any compiled pipeline, whose
    parameters all are given by --set and -f. All are checked before anything is sent; the run goes
    on when this command is interrupted.

    \b
    kfp-ddp run ./photos --local --set epochs=20 --set model=resnet18
    kfp-ddp run gs://bucket/flowers --gpus 1 --set epochs=30 --follow
    kfp-ddp run my_pipeline.yaml --set rounds=3
    kfp-ddp run gs://bucket/flowers --pipeline retrain --dry-run
    """
    if not source and not options["pipeline"]:
        raise click.UsageError("Give a SOURCE, a FILE or --pipeline.")
    others = ON_KFP if local else HERE
    if given := [name for name in others if options[name]]:
        from kfp_ddp.core.errors import InputError

        flag = f"--{given[0].replace('_', '-')}"
        where = "of a run on KFP: leave it out with --local" if local else "of a run with --local"
        raise InputError(f"{flag} is {where}")
    if local:
        _here(source, options)
    else:
        _on_kfp(connection, source, options)


def _here(word: str, options: dict[str, Any]) -> None:
    from kfp_ddp.local.installed import require

    require("local")
    from kfp_ddp.local import own, photographs
    from kfp_ddp.local.session import conduct

    folder, compiled = options["output"] or Path("run-output"), _compiled(word, options)
    given = options["words"], options["file"]

    def begin() -> dict[str, Any]:
        if compiled is None:
            return photographs.train(word, folder.resolve(), *given, options["ranks"] or 0)
        return own.run(compiled, "" if word == str(compiled) else word, folder.resolve(), *given)

    conduct(begin, folder, options["as_json"])


def _compiled(word: str, options: dict[str, Any]) -> Path | None:
    """The pipeline to run here; None for train_resnet, with what fits the photographs.

    Raises:
        InputError: it is not here, or two are given.
    """
    from kfp_ddp.core.errors import InputError
    from kfp_ddp.pipelines import NAMES
    from kfp_ddp.pipelines.document import is_file
    from kfp_ddp.pipelines.form import COMPILED

    name = options["pipeline"].replace("-", "_")
    if is_file(word) and name:
        raise InputError(f"{word} and --pipeline are two pipelines: give one of them")
    if name and name not in NAMES:
        raise InputError(f"--pipeline is one of ours with --local: {', '.join(NAMES)}")
    if name in ("", "train_resnet") and not is_file(word):
        return None
    if options["ranks"]:
        raise InputError("--ranks is of train_resnet: leave it out")
    return Path(word) if is_file(word) else COMPILED / f"{name}.yaml"


def _on_kfp(connection: Connection, word: str, options: dict[str, Any]) -> None:
    import contextlib

    from kfp_ddp.client import submission
    from kfp_ddp.client.connection import open_client
    from kfp_ddp.client.follow import check_success, until_over

    as_json, staying = options["as_json"], options["follow"] or options["wait"]
    with contextlib.ExitStack() as stack:
        pipeline, version = _of_this_machine(word, options), None
        if pipeline is None:
            client = stack.enter_context(open_client(connection))
            pipeline, version = submission.of_server(client, options["pipeline"])
        words, boxes = _boxes(word, pipeline, options)
        words += options["words"]
        given = submission.arguments(pipeline, options["file"], words, boxes)
        name = options["name"] or submission.name_of_a_run(pipeline, given)
        once = {each: options[each] for each in OF_THE_RUN}
        made = submission.Submission(pipeline, version, name, arguments=given, **once)
        if options["dry_run"]:
            _print(made.document(), as_json)
            return
        if version is None:
            client = stack.enter_context(open_client(connection))
        run = made.send(client)
        page = connection.run_page(run.run_id)
        click.echo(f"{name} begins: {page or run.run_id}", err=as_json)
        if staying:
            run = until_over(client, connection, run.run_id, options["wait"], as_json)
        elif not as_json:
            click.echo(f"see how it goes: kfp-ddp status {run.run_id[:8]} --follow")
        if as_json:
            told = {"run_id": run.run_id, "state": run.state, "page": page, **made.document()}
            _print(told, as_json)
        if staying:
            check_success(run)


def _of_this_machine(word: str, options: dict[str, Any]) -> "Document | None":
    """The pipeline of a file, or one of ours; None where the server has to be asked.

    Raises:
        InputError: the file is none, or is given beside another.
    """
    from kfp_ddp.client import submission
    from kfp_ddp.core.errors import InputError
    from kfp_ddp.pipelines.compiled import Images
    from kfp_ddp.pipelines.document import is_file

    if not is_file(word):
        images = Images(*(options[each] for each in OF_THE_IMAGES))
        return submission.ours(options["pipeline"] or "train_resnet", images)
    if options["pipeline"]:
        raise InputError(f"{word} and --pipeline are two pipelines: give one of them")
    return submission.of_file(word)


def _boxes(
    word: str, pipeline: "Document", options: dict[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """What arguments and options put into the form: as words over the file, and what is under it.

    Raises:
        InputError: the form lacks a box for one, or it is given by --set, too.
    """
    from kfp_ddp.core.errors import InputError
    from kfp_ddp.pipelines.document import is_file

    asked = {
        "source": ("SOURCE", "" if is_file(word) else word),
        "gpus_per_node": ("--gpus", options["gpus"]),
        "destination": ("--destination", options["destination"]),
    }
    keys = [each.partition("=")[0] for each in options["words"]]
    words, boxes = [], {}
    for name, (what, value) in asked.items():
        if value in (None, ""):
            continue
        over, takes = what != "--destination" or typed(name), name in pipeline.parameters
        if over and not takes:
            raise InputError(f"{what} cannot be used: {pipeline.name} has no parameter {name}")
        if over and name in keys and what != "--destination":
            raise InputError(f"{name} cannot be set: it is the argument {what}")
        if over:
            words.append(f"{name}={value}")
        elif takes:
            boxes[name] = value
    return words, boxes


def _print(document: dict[str, Any], as_json: bool) -> None:
    import json

    import yaml

    click.echo(
        json.dumps(document)
        if as_json
        else yaml.safe_dump(document, sort_keys=False, allow_unicode=True).rstrip()
    )
