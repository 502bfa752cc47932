"""`kfp-ddp predict`: what pictures show, as a bundle's model has it."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from kfp_ddp.cli.options import AS_JSON, echo_json

TOGETHER = 8
"""Pictures in one call of the model."""


@click.command("predict")
@click.argument("bundle")
@click.argument("pictures", nargs=-1, required=True, metavar="PICTURE...")
@click.option(
    "--top", type=click.IntRange(1), default=3, show_default=True, help="Classes to tell."
)
@AS_JSON
def command(bundle: str, pictures: tuple[str, ...], top: int, as_json: bool) -> None:
    """Tell what each PICTURE shows, a file or a folder of them, and how probable that is.

    BUNDLE is a folder or an address (gs://, s3://, az://): a bundle, the output of a run, or the
    folder of a model's exports, of which it is the champion's.

    kfp-ddp predict run-output/bundle picture.jpg ./more-pictures
    """
    from kfp_ddp.core.errors import InputError
    from kfp_ddp.local.installed import require

    require("predict")
    from kfp_ddp.predict import load

    model = load(bundle)
    paths = [path for given in pictures for path in _pictures(Path(given))]
    width = _width(paths)
    told: list[dict[str, Any]] = []
    for start in range(0, len(paths), TOGETHER):
        told += _answers(model, paths[start : start + TOGETHER], top)
        for answer in () if as_json else told[start:]:
            _print(answer, width)
    if as_json:
        echo_json({"bundle": bundle, "runtime": model.runtime, "pictures": told})
    failed = sum("error" in answer for answer in told)
    if failed:
        raise InputError(f"{failed} of {len(told)} pictures cannot be read")


def _pictures(given: Path) -> Iterator[Path]:
    """The file itself, or the images below a folder."""
    from kfp_ddp.core.errors import InputError
    from kfp_ddp.training.sides import is_image

    if not given.is_dir():
        yield given
        return
    found = sorted(path for path in given.rglob("*") if is_image(path.name) and path.is_file())
    if not found:
        raise InputError(f"folder {given} holds no pictures (.jpg, .png, .webp); name another")
    yield from found


def _answers(model: Any, paths: list[Path], top: int) -> list[dict[str, Any]]:
    """What the model says of pictures that are given to it together; those it cannot read apart."""
    from kfp_ddp.core.errors import InputError

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


def _width(paths: list[Path]) -> int:
    """Columns for the pictures' names: half of the terminal at most."""
    return min(max(len(str(path)) for path in paths), shutil.get_terminal_size().columns // 2)


def _print(answer: dict[str, Any], width: int) -> None:
    from kfp_ddp.core.text import printable

    if "error" in answer:
        click.echo(f"error: {printable(answer['error'])}", err=True)
        return
    name = printable(answer["picture"])
    name = name if len(name) <= width else f"…{name[1 - width :]}"
    told = "  ".join(f"{one['class']} {one['probability']:.1%}" for one in answer["classes"])
    click.echo(f"{name:<{width}}  {printable(told)}")
