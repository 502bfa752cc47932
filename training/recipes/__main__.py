"""Print the flags of a recipe: `python -m kfp_ddp.training $(python -m ... digits --data ...)`."""

import shlex
import sys
from collections.abc import Sequence

from kfp_ddp.training.config import TrainConfig, parse
from kfp_ddp.training.errors import InputError
from kfp_ddp.training.recipes import RECIPES, recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Print the flags on one line; 2 with one line of error for what cannot be used."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in RECIPES:
        print(f"usage: recipes NAME [flags]; NAME is one of {', '.join(RECIPES)}", file=sys.stderr)
        return 2
    name, *flags = arguments
    try:
        merged = recipe(name, **_given(flags))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(shlex.join(merged.to_argv()))
    return 0


def _given(flags: list[str]) -> dict[str, object]:
    """The fields that the flags set, also where to the default."""
    run = parse(flags, prog="recipes")
    defaults = TrainConfig.create(data=run.data, output_dir=run.output_dir)
    named = {flag.removeprefix("--").removeprefix("no-").partition("=")[0] for flag in flags}
    return {
        name: value
        for name, value in run.model_dump().items()
        if name.replace("_", "-") in named or value != getattr(defaults, name)
    }


if __name__ == "__main__":
    sys.exit(main())
