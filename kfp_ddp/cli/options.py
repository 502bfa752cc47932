"""Options of several commands: their text and default are of `kfp_ddp.core.config`."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from kfp_ddp.core import config
from kfp_ddp.core.config import Connection

Command = TypeVar("Command", bound=Callable[..., Any])
SHORT = {"namespace": ["-n"]}
SHOWN = ("host", "namespace")
OF_A_CONNECTION = tuple(Connection.__dataclass_fields__)
AS_JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print one line of JSON; all else goes to stderr."
)


def configured(*names: str) -> Callable[[Command], Command]:
    """Options --experiment and such; what nobody gives is as it was set once, or its default."""

    def decorate(command: Command) -> Command:
        for name in reversed(names):
            command = _option(name, default=functools.partial(_set_once, name))(command)
        return command

    return decorate


def connected(command: Command) -> Command:
    """Options --host, --namespace and such; the command gets them as `connection: Connection`."""

    @functools.wraps(command)
    def called(**given: Any) -> Any:
        flags = {name: given.pop(name) for name in OF_A_CONNECTION}
        values = config.resolved(flags)
        connection = Connection(**{name: values[name].value for name in OF_A_CONNECTION})
        return command(connection=connection, **given)

    for name in reversed(OF_A_CONNECTION):
        called = _option(name, default=None, hidden=name not in SHOWN)(called)
    return called  # type: ignore[return-value]


def _set_once(name: str) -> Any:
    return config.resolved()[name].value


def _option(name: str, **more: Any) -> Callable[[Any], Any]:
    field = config.FIELDS[name]
    flag = f"--{name.replace('_', '-')}"
    if isinstance(field.default, bool):
        more["is_flag"] = True
        flag += f"/--no-{flag[2:]}"
    elif isinstance(field.default, float):
        more["type"] = click.FloatRange(0, min_open=True)
    return click.option(
        flag, *SHORT.get(name, ()), name, help=field.metadata["description"], **more
    )


def typed(name: str) -> bool:
    """Whether an option stands on the command line, which goes before every file."""
    source = click.get_current_context().get_parameter_source(name)
    return source == click.core.ParameterSource.COMMANDLINE


def echo_json(document: Any) -> None:
    """Print what --json asks for: one line."""
    import json  # most calls print text

    click.echo(json.dumps(document))
