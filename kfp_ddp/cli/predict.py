"""`kfp-ddp predict`: classify pictures with the model of a bundle."""

import contextlib
import csv
import itertools
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kfp_ddp.cli.bundles import KEY, find_signer
from kfp_ddp.cli.options import AS_JSON, FILE, FOLDER, echo, echo_json, require, writing
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import plural, printable

if TYPE_CHECKING:
    from kfp_ddp.predict import Model

BATCH = 8
_FORMULA = re.compile(r"[=+\-@\t\r]")


@click.command("predict")
@click.argument("bundle")
@click.argument("pictures", nargs=-1, required=True, metavar="PICTURE...")
@click.option("--top", type=click.IntRange(1), default=3, help="Number of classes to print.")
@click.option("--csv", "table", type=FILE, help="Also write a table with a row for each picture.")
@click.option("--into", type=FOLDER, help="Copy the pictures to a folder for each class in this.")
@click.option(
    "--explain",
    type=FOLDER,
    help="Write pictures to this folder that mark what the class depends on.",
)
@KEY
@AS_JSON
def command(
    bundle: str,
    pictures: tuple[str, ...],
    top: int,
    table: Path | None,
    into: Path | None,
    explain: Path | None,
    key: Path | None,
    as_json: bool,
) -> None:
    """Classify each PICTURE, a file or a folder of files, with probabilities.

    BUNDLE is a folder or a URI (gs://, s3://, az://): a bundle, the output of a run, or the folder
    of a model's versions, for its champion. --explain covers parts of a picture: where that makes
    the class less likely, the picture is orange. It takes 65 predictions for each picture.

    \b
    kfp-ddp predict run-output/latest/bundle picture.jpg ./more-pictures
    kfp-ddp predict run-output/latest/bundle ./pictures --csv classes.csv --into ./sorted
    """
    require("predict")
    from kfp_ddp.predict import load

    model = load(bundle, find_signer(key))
    paths = [path for word in pictures for path in _pictures(Path(word))]
    width = max(len(printable(str(path))) for path in paths)
    if sys.stdout.isatty():
        width = min(width, shutil.get_terminal_size().columns // 2)
    answers: list[dict[str, Any]] = []
    with writing(table or into or explain or Path()):
        if table is not None:
            table.open("a").close()  # before a long computation
        for start in range(0, len(paths), BATCH):
            batch = paths[start : start + BATCH]
            answers += _answers(model, batch, top)
            for path, answer in zip(batch, answers[start:], strict=True):
                if not as_json:
                    _print(answer, width)
                if "error" in answer:
                    continue
                name = answer["classes"][0]["class"]
                if into is not None:
                    shutil.copy2(path, _new_file(into / _folder_name(name), path.name))
                if explain is not None:
                    _explain(model, path, name, _new_file(explain, f"{path.stem}.png"))
        if table is not None:
            _write_table(table, answers, min(top, len(model.classes)))
    if as_json:
        echo_json({"bundle": bundle, "runtime": model.runtime, "pictures": answers})
    failed = sum("error" in answer for answer in answers)
    if failed:
        raise InputError(f"{failed} of {plural(len(answers), 'picture')} cannot be read")


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


def _answers(model: "Model", paths: list[Path], top: int) -> list[dict[str, Any]]:
    """Classify a batch of pictures; if one cannot be read, each on its own."""
    from kfp_ddp.predict import ranking

    try:
        probabilities = model(paths)
    except InputError as error:
        if len(paths) == 1:
            return [{"picture": str(paths[0]), "error": str(error)}]
        return [answer for path in paths for answer in _answers(model, [path], top)]
    return [
        {"picture": str(path), "classes": ranking(model.classes, row, top)}
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


def _write_table(file: Path, answers: list[dict[str, Any]], top: int) -> None:
    """Write a CSV with the likeliest classes, or the error, of each picture.

    A text that a spreadsheet would compute gets a `'` before it.
    """
    names = [name for at in range(1, top + 1) for name in (f"class {at}", f"probability {at}")]
    with file.open("w", encoding="utf-8", errors="surrogateescape", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(["picture", *names, "error"])
        for answer in answers:
            values = [value for one in answer.get("classes", ()) for value in one.values()]
            values += [""] * (len(names) - len(values))
            row = [answer["picture"], *values, answer.get("error", "")]
            writer.writerow([f"'{one}" if _FORMULA.match(str(one)) else one for one in row])


def _explain(model: "Model", path: Path, name: str, target: Path) -> None:
    import numpy as np
    from PIL import Image

    image = model.square(path)
    heat = 0.7 * model.saliency(image, model.classes.index(name))[..., None]
    orange = np.array([255, 120, 0])
    marked = (1 - heat) * image.mean(0)[..., None] + heat * orange
    Image.fromarray(marked.astype(np.uint8)).save(target)


def _folder_name(name: str) -> str:
    """Return the name of a class as that of a folder, which it cannot leave."""
    return re.sub(r"[^\w .-]|^[ .]+|[ .]+$", "_", name) or "_"


def _new_file(folder: Path, name: str) -> Path:
    """Create an empty file in a folder; neither a file nor a link there is replaced or followed."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = folder / (name if number == 1 else f"{Path(name).stem}-{number}{Path(name).suffix}")
        with contextlib.suppress(FileExistsError):
            path.open("xb").close()
            break
    return path
