"""Recipes: the fields of a `TrainConfig` without data and output folder.

`python -m kfp_ddp.training.spec.recipes NAME --data ... --output-dir ... [flags]` prints the flags
of a recipe, with yours instead of its own where both are set, for `kfp_ddp.training` or
`kfp_ddp.training.node`.
"""

import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import rename
from kfp_ddp.training.spec.config import TrainConfig, read_flags
from kfp_ddp.training.spec.network_settings import RANDOM

RecipeName = Literal["auto", "none", "digits", "cifar", "imagenet-90", "imagenet-fast", "finetune"]
Recipe = dict[str, Any]

RECIPES: dict[str, Recipe] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
"""The recipes by name."""
OPTIMIZER_FIELDS = ("learning_rate", "lr_reference_batch", "momentum", "weight_decay")
"""Settings of a recipe that only suit its own optimizer."""


def configured(name: str, fields: Mapping[str, Any]) -> TrainConfig:
    """Create the configuration of a recipe with `fields` (at least data and output_dir) over it.

    With initial weights the recipes auto and none become finetune, which starts from torchvision's
    unless others are given. The recipe's warm-up is dropped if it is not shorter than the epochs,
    and its rates if the optimizer differs. Raise InputError for an unknown recipe, an invalid
    field, or finetune without weights.
    """
    if name not in RECIPES:
        raise InputError(f"the recipe {name!r} does not exist: use one of {', '.join(RECIPES)}")
    fields = rename(fields, TrainConfig)
    name = _adapted_to_weights(name, fields)
    recipe = dict(RECIPES[name])
    # Rates of one optimizer do not suit another.
    if fields.get("optimizer", "sgd") != recipe.get("optimizer", "sgd"):
        recipe = {key: value for key, value in recipe.items() if key not in OPTIMIZER_FIELDS}
    epochs = fields.get("epochs")
    if epochs and TrainConfig.checked("epochs", epochs) <= recipe.get("warmup_epochs", 0):
        recipe.pop("warmup_epochs", None)
    return TrainConfig.create(**{**recipe, **fields})


def _adapted_to_weights(name: str, fields: dict[str, Any]) -> str:
    """Return the recipe for the initial weights of `fields`, where finetune sets its own."""
    pretrained = TrainConfig.checked("pretrained", fields.get("pretrained", "auto"))
    if name == "finetune":
        if pretrained == "auto":
            fields["pretrained"] = "true"
        elif pretrained in RANDOM:
            raise InputError("the recipe finetune needs initial weights: set pretrained to true")
        return name
    if name in ("auto", "none") and pretrained not in RANDOM:
        return "finetune"
    return name


def main(argv: Sequence[str] | None = None) -> int:
    """Print the flags on one line; return 2 with one line of error for invalid input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in RECIPES:
        print(f"usage: recipes NAME [flags]; NAME is one of {', '.join(RECIPES)}", file=sys.stderr)
        return 2
    name, *flags = arguments
    try:
        fields = read_flags(flags, prog=f"recipes {name}", defaults=RECIPES[name])
        words = configured(name, fields).to_argv()
        _check_words(words)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(" ".join(words))
    return 0


def _check_words(words: Sequence[str]) -> None:
    """Raise InputError for a word that a shell's $(...) changes: it would keep the quotes."""
    for word in words:
        if shlex.quote(word) != word:
            raise InputError(
                f"{word!r} does not pass through a shell's $(...) unchanged: "
                "use names without spaces and special characters"
            )


if __name__ == "__main__":
    sys.exit(main())
