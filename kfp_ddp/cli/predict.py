"""`kfp-ddp predict`: classify pictures with the model of a bundle."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from kfp_ddp.cli.bundles import KEY, find_signer
from kfp_ddp.cli.options import AS_JSON, echo, echo_json
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import printable

BATCH = 8


@click.command("predict")
@click.argument("bundle")
@click.argument("pictures", nargs=-1, required=True, metavar="PICTURE...")
@click.option("--top", type=click.IntRange(1), default=3, help="Number of classes to print.")
@KEY
@AS_JSON
def command(
    bundle: str, pictures: tuple[str, ...], top: int, key: Path | None, as_json: bool
) -> None:
    """Classify each PICTURE, a file or a folder of files, with probabilities.

    BUNDLE is a folder or a URI (gs://, s3://, az://): a bundle, the output of a run, or the folder
    of a model's versions, for its champion.

    kfp-ddp predict run-output/bundle picture.jpg ./more-pictures
    """
    from kfp_ddp.local.installed import require

    require("predict")
    from kfp_ddp.predict import load

    model = load(bundle, find_signer(key))
    paths = [path for word in pictures for path in _pictures(Path(word))]
    width = min(max(len(str(path)) for path in paths), shutil.get_terminal_size().columns // 2)
    answers: list[dict[str, Any]] = []
    for start in range(0, len(paths), BATCH):
        answers += _answers(model, paths[start : start + BATCH], top)
        for answer in () if as_json else answers[start:]:
            _print(answer, width)
    if as_json:
        echo_json({"bundle": bundle, "runtime": model.runtime, "pictures": answers})
    failed = sum("error" in answer for answer in answers)
    if failed:
        raise InputError(f"{failed} of {len(answers)} pictures cannot be read")


def _pictures(path: Path) -> Iterator[Path]:
    """Yield the file itself, or the images below a folder."""
    from kfp_ddp.training.sides import SUFFIXES, is_image

    if not path.is_dir():
        yield path
        return
    files = sorted(file for file in path.rglob("*") if is_image(file.name) and file.is_file())
    if not files:
        raise InputError(
            f"folder {path} contains no pictures ({', '.join(SUFFIXES)}); name another"
        )
    yield from files


def _answers(model: Any, paths: list[Path], top: int) -> list[dict[str, Any]]:
    """Classify a batch of pictures; if one cannot be read, each on its own."""
    try:
        probabilities = model(paths)
    except InputError as error:
        if len(paths) == 1:
            return [{"picture": str(paths[0]), "error": str(error)}]
        return [answer for path in paths for answer in _answers(model, [path], top)]
    return [
        {
            "picture": str(path),
            "classes": [
                {"class": model.classes[at], "probability": float(row[at])}
                for at in (-row).argsort(kind="stable")[:top]
            ],
        }
        for path, row in zip(paths, probabilities, strict=True)
    ]


def _print(answer: dict[str, Any], width: int) -> None:

    if "error" in answer:
        echo(f"error: {answer['error']}", err=True)
        return
    name = printable(answer["picture"])
    name = name if len(name) <= width else f"…{name[1 - width :]}"
    text = "  ".join(f"{one['class']} {one['probability']:.1%}" for one in answer["classes"])
    echo(f"{name:<{width}}  {text}")
