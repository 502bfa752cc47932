"""Options that several commands share; texts and defaults come from `kfp_ddp.core.config`."""

import dataclasses
import functools
import math
import os
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kfp_ddp.core import config
from kfp_ddp.core.machine import require as require
from kfp_ddp.core.text import printable

if TYPE_CHECKING:
    from kfp_ddp.client.submit.submission import Inputs
    from kfp_ddp.core.config import Connection
    from kfp_ddp.core.settings import Settings

Command = TypeVar("Command", bound=Callable[..., Any])
SHORT = {"namespace": ["-n"]}
SHOWN = ("host", "namespace")
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)
text_option = functools.partial(click.option, default="", show_default=False)
SET = click.option(
    *("--set", "words"),
    multiple=True,
    metavar="KEY=VALUE",
    help="A parameter of the pipeline or a setting in it, such as epochs=10 or precision=bf16. "
    "May be repeated.",
)
SETTINGS_FILE = click.option(
    *("--file", "-f"), type=FILE, help="YAML file of such settings, which --set overrides."
)
AS_JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print one line of JSON; other output goes to stderr."
)


def added(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Add some options, which the help lists in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def configured(*names: str) -> Callable[[Command], Command]:
    """Add options such as --experiment, whose defaults are the configured settings."""
    return added(*(_option(n, default=lambda n=n: config.chosen(n)[n]) for n in names))


def connected(command: Command) -> Command:
    """Add options such as --host; the command gets them as `connection: Connection`."""

    @functools.wraps(command)
    def wrapper(**options: Any) -> Any:
        flags = {name: options.pop(name) for name in config.CONNECTION}
        return command(connection=config.connection(flags), **options)

    options = (_option(n, default=None, hidden=n not in SHOWN) for n in config.CONNECTION)
    return added(*options)(wrapper)  # type: ignore[return-value]


def with_client(command: Command) -> Command:
    """Add options such as --host; the command gets a `client` of these and of its settings."""

    @functools.wraps(command)
    def wrapper(connection: "Connection", **options: Any) -> Any:
        from kfp_ddp.client.api import Client

        settings = {name: value for name, value in options.items() if name in config.FIELDS}
        with Client(connection=connection, **settings) as client:
            return command(client=client, **options)

    return connected(wrapper)  # type: ignore[return-value]


served = added(AS_JSON, with_client)


def _option(name: str, **more: Any) -> Callable[[Any], Any]:
    # The default is that of a file or variable.
    return field_option(config.FIELDS[name], *SHORT.get(name, ()), show_default=False, **more)


class _Number(click.FloatRange):
    """Refuses infinity, and NaN, which click accepts in every range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def field_option(
    field: "dataclasses.Field[Any]", *short: str, **more: Any
) -> Callable[[Command], Command]:
    """Return the option for a field of a dataclass, by its type, default, description and bounds.

    `short` are further flags, `more` replaces arguments of click's.
    """
    about = field.metadata
    kind = field.type
    flag = f"--{field.name.replace('_', '-')}"
    option: dict[str, Any] = {"help": about["description"], "default": field.default, **more}
    if kind is bool:
        option["is_flag"] = True
        flag += "" if option["default"] is False else f"/--no-{flag[2:]}"
    elif isinstance(field.default, tuple):
        option |= {"multiple": True, "help": f"{about['description']} May be repeated."}
    elif kind is int:
        option["type"] = click.IntRange(about.get("ge"), about.get("le"))
    elif kind is float:
        least = about.get("ge", about.get("gt"))
        option["type"] = _Number(least, about.get("le"), min_open="gt" in about)
    elif choices := typing.get_args(kind):
        option["type"] = click.Choice(choices)
    return click.option(flag, *short, field.name, **option)


def field_options(record: type[Any], *names: str) -> Callable[[Command], Command]:
    """Add an option for each of these described fields of a dataclass."""
    fields = {field.name: field for field in dataclasses.fields(record)}
    return added(*(field_option(fields[name]) for name in names))


def model_options(
    model: "type[Settings]", *names: str, **more: Any
) -> Callable[[Command], Command]:
    """Add an option for each of these fields of a model, with its meaning, default and choices."""

    def option(name: str) -> Callable[[Any], Any]:
        field = model.model_fields[name]
        choices = model.choices(name)
        about: dict[str, Any] = {"help": field.description, "default": field.default}
        about["type"] = click.Choice(choices) if choices else field.annotation
        return click.option(f"--{name.replace('_', '-')}", **{**about, **more})

    return added(*map(option, names))


def is_on_command_line(name: str) -> bool:
    """Return whether an option is on the command line, which overrides every file."""
    source = click.get_current_context().get_parameter_source(name)
    return source == click.core.ParameterSource.COMMANDLINE


def inputs(options: dict[str, Any]) -> "Inputs":
    """Return the settings of a pipeline."""
    from kfp_ddp.client.submit.submission import Inputs

    flags = {"--gpus": ("gpus_per_node", options.get("gpus"))}
    if "destination" in options and is_on_command_line("destination"):
        flags["--destination"] = ("destination", options["destination"])
    return Inputs(options["words"], options["file"], flags)


def echo(line: object, err: bool = False) -> None:
    """Print a line; what would move the cursor, such as a name from a bucket may, is escaped."""
    click.echo(printable(str(line)), err=err)


def echo_json(document: Any) -> None:
    """Print one line of JSON, with paths as text."""
    import json  # most calls print text

    click.echo(json.dumps(document, default=os.fspath))


def show(as_json: bool, document: Any, *lines: object) -> None:
    """Print a document as one line of JSON, or these lines in its place."""
    if as_json:
        echo_json(document)
    else:
        for line in lines:
            echo(line)
