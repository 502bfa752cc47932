"""Recipes: the fields of a `TrainConfig` without data and output folder.

`python -m kfp_ddp.training.recipes NAME --data ... --output-dir ... [flags]` prints the flags of a
recipe, with yours instead of its own where both are set, for `kfp_ddp.training` or
`kfp_ddp.training.node`.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import rename
from kfp_ddp.training.config import RANDOM, TrainConfig
from kfp_ddp.training.flags import read_flags

RecipeName = Literal["auto", "none", "digits", "cifar", "imagenet-90", "imagenet-fast", "finetune"]
Recipe = dict[str, Any]

RECIPES: dict[str, Recipe] = {
    # A pipeline replaces it by settings that fit the images and the hardware.
    "auto": {},
    "none": {},
    # scikit-learn's digits, 8x8: about 99 % on two CPU ranks in seconds.
    "digits": {
        "model": "cifar_resnet8",
        "image_size": 16,
        "epochs": 6,
        "batch_size": 64,
        "learning_rate": 0.2,
        "warmup_epochs": 1.0,
        "label_smoothing": 0.05,
        "workers": 0,
    },
    # 32 px, flips and shifts of four pixels (He et al. 2015, section 4.2: 91.25 % on CIFAR-10).
    "cifar": {
        "model": "cifar_resnet20",
        "image_size": 32,
        "epochs": 160,
        "batch_size": 128,
        "learning_rate": 0.1,
        "weight_decay": 1e-4,
        "warmup_epochs": 1.0,
        "label_smoothing": 0.0,
        "augment": "shift-flip",
        "cache_gb": 1.0,
        "workers": 2,
        "eval_epochs": 5,
        "checkpoint_epochs": 5,
    },
    # NVIDIA's ResNet-50 v1.5 (DeepLearningExamples; there 77.1 % in 90 epochs); batch for 8 GPUs.
    "imagenet-90": {
        "model": "resnet50",
        "image_size": 224,
        "epochs": 90,
        "batch_size": 2048,
        "learning_rate": 0.256,
        "lr_reference_batch": 256,
        "momentum": 0.875,
        "weight_decay": 2.0**-15,
        "warmup_epochs": 8.0,
        "label_smoothing": 0.1,
        "augment": "crop-flip",
        "workers": 12,
    },
    # Growing images, blur pool, averaged weights, after FFCV's rn50 (there 71 % to 78 %, 16 to 88
    # epochs); raise epochs for accuracy. Evaluated at a larger size than trained at, as there.
    "imagenet-fast": {
        "model": "resnet50",
        "blur_pool": True,
        "image_size": 224,
        "train_image_size": 192,
        "start_image_size": 160,
        "epochs": 16,
        "batch_size": 1024,
        "learning_rate": 0.425,
        "lr_reference_batch": 256,
        "weight_decay": 1e-4,
        "warmup_epochs": 2.0,
        "label_smoothing": 0.1,
        "ema_decay": 0.999,
        "augment": "crop-flip",
        "crop_min_area": 0.25,
        "workers": 12,
    },
    # From the weights of `pretrained`, for hundreds to some ten thousand images: an epoch for the
    # classifier alone, as in fastai's fine_tune, then all of it, the body at a tenth of the rate.
    "finetune": {
        "epochs": 15,
        "batch_size": 64,
        "learning_rate": 0.04,
        "lr_reference_batch": 64,
        "body_lr_factor": 0.1,
        "freeze_epochs": 1,
        "weight_decay": 1e-4,
        "warmup_epochs": 0.5,
        "label_smoothing": 0.1,
        "crop_min_area": 0.35,
        "keep_best": True,
        "cache_gb": 4.0,
    },
}


OPTIMIZER_FIELDS = ("learning_rate", "lr_reference_batch", "momentum", "weight_decay")
"""Settings of a recipe that only suit its own optimizer."""


def configured(name: str, fields: Mapping[str, Any]) -> TrainConfig:
    """Create the configuration of a recipe with `fields` (at least data and output_dir) over it.

    With initial weights the recipes auto and none become finetune, which starts from torchvision's
    unless others are given. The recipe's warm-up is dropped if it is not shorter than the epochs,
    and its rates if the optimizer differs. Raises InputError for an unknown recipe, an invalid
    field, or finetune without weights.
    """
    if name not in RECIPES:
        raise InputError(f"the recipe {name!r} does not exist: use one of {', '.join(RECIPES)}")
    fields = rename(fields, TrainConfig)
    pretrained = TrainConfig.checked("pretrained", fields.get("pretrained", "auto"))
    if name == "finetune" and pretrained == "auto":
        fields["pretrained"] = "true"
    elif name == "finetune" and pretrained in RANDOM:
        raise InputError("the recipe finetune needs initial weights: set pretrained to true")
    if name in ("auto", "none") and pretrained not in RANDOM:
        name = "finetune"
    recipe, epochs = dict(RECIPES[name]), fields.get("epochs")
    if fields.get("optimizer", "sgd") != recipe.get("optimizer", "sgd"):
        recipe = {key: value for key, value in recipe.items() if key not in OPTIMIZER_FIELDS}
    if epochs and TrainConfig.checked("epochs", epochs) <= recipe.get("warmup_epochs", 0):
        recipe.pop("warmup_epochs", None)
    return TrainConfig.create(**{**recipe, **fields})


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
        for word in words:
            if shlex.quote(word) != word:  # $(...) would keep the quotes
                raise InputError(
                    f"{word!r} does not pass through a shell's $(...) unchanged: "
                    "use names without spaces and special characters"
                )
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(" ".join(words))
    return 0


if __name__ == "__main__":
    sys.exit(main())
