"""Print the flags of a recipe: `python -m kfp_ddp.training $(python -m ... digits --data ...)`."""

import shlex
import sys
from collections.abc import Sequence

from kfp_ddp.core.errors import InputError
from kfp_ddp.training.config import flags_given
from kfp_ddp.training.recipes import RECIPES, configured


def main(argv: Sequence[str] | None = None) -> int:
    """Print the flags on one line; 2 with one line of error for what cannot be used."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in RECIPES:
        print(f"usage: recipes NAME [flags]; NAME is one of {', '.join(RECIPES)}", file=sys.stderr)
        return 2
    name, *flags = arguments
    try:
        given = flags_given(flags, prog=f"recipes {name}", defaults=RECIPES[name])
        print(" ".join(_words(configured(name, given).to_argv())))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _words(argv: list[str]) -> list[str]:
    """`argv`, if a shell that puts in what we print takes it apart again as it is."""
    for word in argv:
        if shlex.quote(word) != word:  # $(...) would keep the quotes
            raise InputError(
                f"{word!r} does not pass through a shell's $(...) as it is: "
                "use names without spaces and special characters"
            )
    return argv


if __name__ == "__main__":
    sys.exit(main())
