"""The command line of a training: each field of `TrainConfig` is a flag."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import hint
from kfp_ddp.training.spec import model_file
from kfp_ddp.training.spec.config import TrainConfig


def parse(argv: Sequence[str] | None = None, prog: str | None = None) -> TrainConfig:
    """Parse command line flags, by default those of this process; raise InputError."""
    return TrainConfig.create(**model_file.with_code(read_flags(argv, prog)))


def read_flags(
    argv: Sequence[str] | None = None,
    prog: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the fields that command line flags set, unvalidated; the help shows `defaults`."""
    parser = argparse.ArgumentParser(
        prog,
        "%(prog)s [flags]",
        "Train an image classifier.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for name, field in TrainConfig.model_fields.items():
        default = (defaults or {}).get(name, "required" if field.is_required() else field.default)
        choices = [f"one of {', '.join(options)}"] if (options := TrainConfig.choices(name)) else []
        notes = "; ".join([*choices, f"default: {default!r}"])
        text = f"{field.description} ({notes})".replace("%", "%%")
        flags = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
        if field.annotation is bool:
            parser.add_argument(*flags, help=text, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(*flags, help=text, metavar=name.upper())
    parsed, unknown = parser.parse_known_args(argv)
    if unknown:
        near = hint(unknown[0].lstrip("-").replace("-", "_"), list(TrainConfig.model_fields))
        raise InputError(f"there is no flag {unknown[0]}{near}")
    return vars(parsed)
