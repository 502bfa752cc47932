"""`kfp-ddp predict` and `serve`: use the model of a bundle."""

import contextlib
import itertools
import os
import re
import shutil
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import yaml

from kfp_ddp.cli.models import KEY, find_signer
from kfp_ddp.cli.options import AS_JSON, FILE, FOLDER, SET, echo, echo_json, require, text_option
from kfp_ddp.core.errors import InputError, writing
from kfp_ddp.core.spreadsheet import write_for_excel
from kfp_ddp.core.text import plural, printable
from kfp_ddp.models.bundle import REFERENCE
from kfp_ddp.models.inference_service import RUNTIMES

if TYPE_CHECKING:
    from kfp_ddp.models.doubt import Thresholds
    from kfp_ddp.models.signature import Signer
    from kfp_ddp.predict import Model


BATCH = 8
UNSURE = "_unsure"
"""Folder of `--into` for the pictures that are not sure."""
_DIGITS = 4
"""Of a probability in a table."""


@click.command("predict")
@click.argument("bundle")
@click.argument("pictures", nargs=-1, metavar="PICTURE...")
@click.option("--top", type=click.IntRange(1), default=3, help="Number of classes to print.")
@click.option("--csv", "table", type=FILE, help="Also write a table with a row for each picture.")
@click.option(
    "--into",
    type=FOLDER,
    help="Copy the pictures to a folder for each class in this, unsure ones to _unsure.",
)
@click.option(
    "--explain",
    type=FOLDER,
    help="Write pictures to this folder that mark what the class depends on.",
)
@click.option(
    "--allow-code", is_flag=True, help="Run the network's own code of a bundle without model.onnx."
)
@click.option(
    "--compare", is_flag=True, help="Only compare a folder or an address with the evaluated images."
)
@click.option("--job", is_flag=True, help="Predict all objects of the address SOURCE on KFP.")
@SET
@KEY
@AS_JSON
@click.pass_context
def predict(
    context: click.Context,
    bundle: str,
    pictures: tuple[str, ...],
    job: bool,
    words: tuple[str, ...],
    top: int,
    table: Path | None,
    into: Path | None,
    explain: Path | None,
    compare: bool,
    allow_code: bool,
    key: Path | None,
    as_json: bool,
) -> None:
    """Classify each PICTURE, a file or a folder of files, with probabilities.

    BUNDLE is a folder or a URI (gs://, s3://, az://): a bundle, the output of a run, or the folder
    of a model's versions, for its champion. With --csv only a summary is printed. --explain covers
    parts of a picture: where that makes the class less likely, the picture is orange; its darker
    edges are not seen by the model. It takes 65 predictions for each picture.

    \b
    kfp-ddp predict run-output/latest/bundle picture.jpg ./more-pictures
    kfp-ddp predict run-output/latest/bundle ./pictures --csv classes.csv --into ./sorted
    kfp-ddp predict gs://models/flowers gs://bucket/new --job --set table=gs://bucket/new.parquet
    """
    if job or words or not pictures:
        _run_pipeline(context, [bundle, *pictures], words)
        return
    require("predict")
    signer = find_signer(key)
    if compare:
        _compare(bundle, pictures, signer, allow_code, as_json)
        return
    from kfp_ddp.predict import load

    model = load(bundle, signer, allow_code=allow_code)
    paths = [path for word in pictures for path in _pictures(Path(word))]
    outputs = _Outputs(table, into, explain)
    width = 0 if as_json or table else _name_width(paths)
    with writing(table or into or explain or Path()):
        answers = _predict(model, paths, top, outputs, width)
    if as_json:
        about = {"bundle": bundle, "runtime": model.runtime, "notes": model.thresholds.notes}
        echo_json({**about, "pictures": answers})
    elif table or len(answers) > 1:
        _print_summary(answers, table, model.thresholds)
    failed = sum("error" in answer for answer in answers)
    if failed:
        raise InputError(f"{failed} of {plural(len(answers), 'picture')} cannot be read")


class _Outputs(NamedTuple):
    """Where the results of predictions go, besides the terminal."""

    table: Path | None
    into: Path | None
    explain: Path | None


def _predict(
    model: "Model", paths: Sequence[Path], top: int, outputs: _Outputs, width: int
) -> list[dict[str, Any]]:
    """Classify pictures, and write the outputs; with a width, print each as it is known."""
    if outputs.table is not None:
        outputs.table.open("a").close()  # before a long computation
    folders = _folder_names(model.classes)
    answers = []
    for path, answer in _classified(model, paths, top):
        answers.append(answer)
        if width:
            _print_classes(answer, width)
        if "error" in answer:
            continue
        name = answer["classes"][0]["class"]
        if outputs.into is not None:
            folder = UNSURE if answer["sure"] is False else folders[name]
            shutil.copy2(path, _new_file(outputs.into / folder, path.name))
        if outputs.explain is not None:
            target = _new_file(outputs.explain, f"{path.stem}.png")
            model.explain(path, model.classes.index(name)).save(target)
    if outputs.table is not None:
        write_table(outputs.table, answers, min(top, len(model.classes)))
    return answers


def _classified(
    model: "Model", paths: Sequence[Path], top: int
) -> Iterator[tuple[Path, dict[str, Any]]]:
    for start in range(0, len(paths), BATCH):
        batch = [*paths[start : start + BATCH]]
        yield from zip(batch, _answers(model, batch, top), strict=True)


def _name_width(paths: Sequence[Path]) -> int:
    """Return the width of the column of names; in a terminal at most half of it."""
    width = max(len(printable(str(path))) for path in paths)
    if sys.stdout.isatty():
        return min(width, shutil.get_terminal_size().columns // 2)
    return width


def _compare(
    bundle: str, pictures: Sequence[str], signer: "Signer | None", allow_code: bool, as_json: bool
) -> None:
    """Predict a source into a table that is dropped, and print how its images compare."""
    if len(pictures) > 1:
        raise click.UsageError("--compare takes one folder or address of pictures.")
    require("local")
    from kfp_ddp.evaluation.bulk import Table, describe_drift
    from kfp_ddp.evaluation.bulk_rank import predict_share
    from kfp_ddp.evaluation.request import PredictionRequest

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        table = f"{folder}/table.csv"
        options = {"allow_code": allow_code}
        request = PredictionRequest.from_inputs(pictures[0], bundle, table, options)
        predict_share(request, signer=signer)
        drift = Table(table).read_record()["drift"]
    if not drift:
        raise InputError(f"{bundle} has no {REFERENCE}: export the model again")
    if as_json:
        echo_json(drift)
    else:
        figures, words = describe_drift(drift)
        echo(figures)
        echo(words)


def _run_pipeline(context: click.Context, addresses: list[str], words: Sequence[str]) -> None:
    """Send the pipeline batch_predict by the command `run`; refuse options of predictions here."""
    from kfp_ddp.cli.run import run

    given = {name: value for name, value in context.params.items() if value and name != "top"}
    allowed = {"bundle", "pictures", "job", "words", "as_json", "allow_code"}
    suits = len(addresses) <= 2 and given.keys() <= allowed
    if not suits or not context.params["job"]:
        raise click.UsageError("Give BUNDLE PICTURE..., or BUNDLE SOURCE --job --set table=URI.")
    *bundle, source = addresses  # `--set bundle=URI` is one more way
    settings = [f"bundle={address}" for address in bundle]
    settings += words
    if "allow_code" in given:
        settings.append("prediction.allow_code=true")
    arguments = [source, "--pipeline", "batch_predict"]
    arguments += [f"--set={setting}" for setting in settings]
    if "as_json" in given:
        arguments.append("--json")
    run.main(arguments, standalone_mode=False)


def _pictures(path: Path) -> list[Path]:
    """Return the file itself, or the images below a folder."""
    from kfp_ddp.pictures.reading import is_image
    from kfp_ddp.pictures.sides import no_images

    if not path.is_dir():
        return [path]
    below = {file.relative_to(path).as_posix(): file for file in path.rglob("*")}
    files = sorted(below[name] for name in filter(is_image, below) if below[name].is_file())
    if not files:
        raise InputError(f"folder {path} has {no_images(below)}: name another")
    return files


def _answers(model: "Model", paths: list[Path], top: int) -> list[dict[str, Any]]:
    """Classify a batch of pictures; if one cannot be read, each on its own."""
    from kfp_ddp.predict import ranking, softmax

    try:
        scores = model.scores(paths)
    except InputError as error:
        if len(paths) == 1:
            return [{"picture": str(paths[0]), "error": str(error)}]
        return [answer for path in paths for answer in _answers(model, [path], top)]
    answers = zip(paths, model.thresholds.sure(scores), softmax(scores), strict=True)
    return [
        {"picture": str(path), "sure": sure, "classes": ranking(model.classes, row, top)}
        for path, sure, row in answers
    ]


def _print_classes(answer: dict[str, Any], width: int) -> None:
    if "error" in answer:
        echo(f"error: {answer['error']}", err=True)
        return
    name = printable(answer["picture"])
    if len(name) > width:
        name = f"…{name[1 - width :]}"
    classes = [f"{row['class']} {row['probability']:.1%}" for row in answer["classes"]]
    if answer["sure"] is False:
        classes.append("unsure")
    echo(f"{name:<{width}}  {'  '.join(classes)}")


def _print_summary(
    answers: Sequence[dict[str, Any]], table: Path | None, thresholds: "Thresholds"
) -> None:
    """Print the number of pictures of each class, of unsure and of unreadable ones."""
    likeliest = [answer["classes"][0] for answer in answers if "error" not in answer]
    counts = Counter(map(itemgetter("class"), likeliest))
    counts["cannot be read"] += len(answers) - len(likeliest)
    unsure = sum(answer.get("sure") is False for answer in answers)
    total = plural(len(answers), "picture")
    echo(f"{total} by class:")
    for name, count in (+counts).most_common():
        echo(f"{count:>7,}  {name}")
    if thresholds.known:
        echo(f"unsure: {unsure:,} of {total}")
    for note in thresholds.notes:
        echo(note)
    if table is not None:
        echo(f"wrote {table}, {plural(len(answers), 'row')}")


def write_table(file: Path, answers: list[dict[str, Any]], top: int) -> None:
    """Write a CSV with the likeliest classes, and if they are sure, or the error of each."""
    from kfp_ddp.models.doubt import WORDS

    names: list[str] = []
    for rank in range(1, top + 1):
        names += [f"class {rank}", f"probability {rank}"]
    rows: list[list[Any]] = [["picture", *names, "sure", "error"]]
    for answer in answers:
        values: list[Any] = []
        for likely in answer.get("classes", ()):
            values += [likely["class"], round(likely["probability"], _DIGITS)]
        values += [""] * (len(names) - len(values))
        values.append(WORDS[answer.get("sure")])
        rows.append([answer["picture"], *values, answer.get("error", "")])
    with file.open("w", encoding="utf-8", errors="surrogateescape", newline="") as opened:
        write_for_excel(opened, rows)


def _folder_names(classes: Sequence[str]) -> dict[str, str]:
    """Return a folder name for each class, without characters that could leave a folder."""
    names = [re.sub(r"[^\w .-]|^[ .]+|[ .]+$", "_", name) or "_" for name in classes]
    counts = Counter(map(str.casefold, [UNSURE, *names]))
    return {
        original: f"{name}-{number}" if counts[name.casefold()] > 1 else name
        for number, (original, name) in enumerate(zip(classes, names, strict=True))
    }


def _new_file(folder: Path, name: str) -> Path:
    """Create an empty file in a folder; neither a file nor a link there is replaced or followed."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = folder / (name if number == 1 else f"{Path(name).stem}-{number}{Path(name).suffix}")
        with contextlib.suppress(FileExistsError):
            path.open("xb").close()
            break
    return path


@click.command("serve")
@click.argument("bundle")
@text_option("--variant", help="Variant of the model, such as int8.")
@click.option("--name", help="Name of the model in requests.  [default: the bundle's]")
@text_option("--listen", help="Address to listen on.  [default: 127.0.0.1, in a pod 0.0.0.0]")
@click.option("--port", type=click.IntRange(1, 65535), default=8080, help="HTTP port.")
@click.option(
    "--grpc-port", type=click.IntRange(0, 65535), default=8081, help="gRPC port; 0 for none."
)
@click.option(
    "--threads",
    type=click.IntRange(0),
    default=0,
    help="Threads per call; 0 for one per core that this process may use.",
)
@click.option(
    "--max-batch",
    type=click.IntRange(1),
    default=32,
    help="Maximum batch of images from waiting requests.",
)
@click.option(
    "--max-waiting",
    type=click.IntRange(1),
    default=1024,
    help="Maximum number of waiting images; further requests are refused (503).",
)
@click.option(
    "--max-pixels",
    type=click.IntRange(1),
    help="Pixels of the largest picture, of 3 bytes when decoded.  [default: max_pixels of the "
    "training]",
)
@KEY
@click.option(
    "--manifest",
    type=click.Choice(RUNTIMES),
    help="Print KServe's InferenceService for the bundle's URI and this runtime instead.",
)
@text_option("--image", help="Image for --manifest kfp-ddp, with the extra `serve`.")
def serve(
    bundle: str,
    variant: str,
    name: str | None,
    listen: str,
    port: int,
    grpc_port: int,
    threads: int,
    max_batch: int,
    max_waiting: int,
    max_pixels: int | None,
    key: Path | None,
    manifest: str | None,
    image: str,
) -> None:
    """Serve the model of BUNDLE: a page to try it on, and the protocols of KServe.

    BUNDLE is a folder or a URI (gs://, s3://, az://): a bundle, the output of a run, or the folder
    of a model's versions, for its champion. Only files of the bundle's manifest are loaded, and the
    model is tested on the bundle's sample first. Open http://localhost:8080 in a browser to try the
    model on pictures. POST /predict takes a picture file. The v2 protocol is at /v2 and on gRPC,
    metrics for Prometheus at /metrics. On SIGTERM the server completes the current requests, for at
    most 30 seconds; in a pod it first takes new ones for 10 seconds.

    \b
    kfp-ddp serve run-output/latest/bundle --name flowers
    curl --data-binary @picture.jpg localhost:8080/predict
    curl --json @run-output/latest/bundle/sample/request.json localhost:8080/v2/models/flowers/infer
    kfp-ddp serve gs://my-bucket/models/flowers --manifest kserve-tritonserver | kubectl apply -f -
    """
    if manifest:
        signer = find_signer(key)
        click.echo(_manifest(bundle, name, manifest, image, signer), nl=False)
        return

    require("serve")
    from kfp_ddp.serve.served import ready

    listen = listen or ("0.0.0.0" if "KUBERNETES_SERVICE_HOST" in os.environ else "127.0.0.1")  # noqa: S104
    for number in filter(None, (port, grpc_port)):
        _check_free(listen, number)
    model = ready(bundle, variant, threads, find_signer(key), max_pixels)
    host = "localhost" if listen in ("0.0.0.0", "::", "::1") else listen  # noqa: S104
    what = f"{model.sealed.uri} ({model.sealed.version}), {model.file} in {model.loaded.runtime}"
    for note in model.thresholds.notes:
        echo(note, err=True)
    from kfp_ddp.serve.kserve_server import serve

    serve(
        model,
        name or model.sealed.model_name,
        listen=listen,
        port=port,
        grpc_port=grpc_port,
        largest=max_batch,
        waiting=max_waiting,
        line=printable(f"{what}: open http://{host}:{port}"),
    )


def _manifest(
    bundle: str, name: str | None, runtime: str, image: str, signer: "Signer | None"
) -> str:
    from kfp_ddp.models.champion import open_bundle
    from kfp_ddp.models.inference_service import manifest

    sealed = open_bundle(bundle, signer=signer)
    model = sealed.model_name
    service = manifest(name or model.lower(), sealed.uri, model, runtime, image=image)
    return yaml.safe_dump(service, sort_keys=False)


def _check_free(address: str, port: int) -> None:
    """Refuse a port that is not free, before the model is loaded."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, port), family=family).close()
    except OSError as error:
        raise InputError(
            f"port {port} of {address} is not available ({error.strerror}): give another one"
        ) from None
