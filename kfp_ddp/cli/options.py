"""Options that several commands share; texts and defaults come from `kfp_ddp.core.config`."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click

from kfp_ddp.core import config
from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.text import printable

Command = TypeVar("Command", bound=Callable[..., Any])
SHORT = {"namespace": ["-n"]}
SHOWN = ("host", "namespace")
CONNECTION_OPTIONS = tuple(
    name for name in Connection.__dataclass_fields__ if name in config.FIELDS
)
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)
text_option = functools.partial(click.option, default="", show_default=False)
AS_JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print one line of JSON; other output goes to stderr."
)
_LOCAL = (
    *("numpy", "PIL", "safetensors", "simplejpeg", "torch", "torchcodec", "torchvision"),
    *("onnx", "onnxruntime", "onnxscript", "psutil"),
)
_MODULES = {
    "predict": ("numpy", "PIL"),
    "serve": ("kserve", "numpy"),
    "local": _LOCAL,
    "demo": (*_LOCAL, "gcp_storage_emulator", "requests", "sklearn"),
}


def configured(*names: str) -> Callable[[Command], Command]:
    """Add options such as --experiment, whose defaults are the configured settings."""

    def decorate(command: Command) -> Command:
        for name in reversed(names):
            command = _option(name, default=functools.partial(_configured, name))(command)
        return command

    return decorate


def connected(command: Command) -> Command:
    """Add options such as --host; the command gets them as `connection: Connection`."""

    @functools.wraps(command)
    def wrapper(**options: Any) -> Any:
        flags = {name: options.pop(name) for name in CONNECTION_OPTIONS}
        values = config.resolved(flags)
        if values["host"].origin == config.HERE:
            echo(f"the host is that of {config.HERE}: {values['host'].value}", err=True)
        chosen = {name: values[name].value for name in CONNECTION_OPTIONS}
        connection = Connection(**chosen, untrusted=config.untrusted("host", flags))
        return command(connection=connection, **options)

    for name in reversed(CONNECTION_OPTIONS):
        wrapper = _option(name, default=None, hidden=name not in SHOWN)(wrapper)
    return wrapper  # type: ignore[return-value]


def _configured(name: str) -> Any:
    if name in config.GUARDED and (reason := config.untrusted(name)):
        raise InputError(reason)
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
        *(flag, *SHORT.get(name, ()), name),
        help=field.metadata["description"],
        show_default=False,  # that of a file or variable
        **more,
    )


def on_command_line(name: str) -> bool:
    """Return whether an option is on the command line, which overrides every file."""
    source = click.get_current_context().get_parameter_source(name)
    return source == click.core.ParameterSource.COMMANDLINE


def registry_set() -> str:
    """Return the registry that the user sets; '' for the default, which has no images."""
    flag = click.get_current_context().params["registry"] if on_command_line("registry") else None
    chosen = config.resolved({"registry": flag})["registry"]
    return "" if chosen.origin == "default" else str(chosen.value)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into a StorageError about `path`, or the file it names."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{error.filename or path} cannot be written: {error.strerror}; make room, or give "
            "a path in a writable folder"
        ) from None


def echo(line: object, err: bool = False) -> None:
    """Print a line; what would move the cursor, such as a name from a bucket may, is escaped."""
    click.echo(printable(str(line)), err=err)


def echo_json(document: Any) -> None:
    """Print one line of JSON."""
    import json  # most calls print text

    click.echo(json.dumps(document))


def require(extra: str) -> None:
    """Check that the packages of an extra are installed; InputError says how to install all."""
    for module in _MODULES[extra]:
        if find_spec(module) is None:
            raise InputError(
                f"this needs {module}, which is not installed: pip install 'kfp-ddp[{extra}]', "
                f"or in a checkout pip install '.[{extra}]'"
            )
