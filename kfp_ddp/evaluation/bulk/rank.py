"""One rank of a batch prediction: downloads its shards, predicts them, and writes their parts."""

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import torch

from kfp_ddp.core.errors import KfpDdpError, UnavailableError, writing
from kfp_ddp.core.folders import scratch_dir
from kfp_ddp.core.text import one_line
from kfp_ddp.datasets.context import Context
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.stage import FileStage
from kfp_ddp.datasets.transfer import Transfer
from kfp_ddp.evaluation.bulk import table
from kfp_ddp.evaluation.bulk.plan import LOST, Destination, Shard, content_of, list_objects
from kfp_ddp.evaluation.bulk.request import PredictionRequest
from kfp_ddp.evaluation.evaluator import Subject, read_bundle
from kfp_ddp.evaluation.predict import Work, scored
from kfp_ddp.runs.workspace import MORE_STORAGE
from kfp_ddp.storage.kinds import open_source
from kfp_ddp.storage.listing import Listing
from kfp_ddp.storage.source import Changed, Retry, Source, SourceOptions
from kfp_ddp.training.config import Reading
from kfp_ddp.training.data import decoder, loader
from kfp_ddp.training.data.shards import Where, content
from kfp_ddp.training.data.splits import Index
from kfp_ddp.training.distributed import World, alone


@dataclasses.dataclass
class Local:
    """A shard with its files on this disk, and its predictions."""

    shard: Shard
    folder: Path
    images: Index
    lost: dict[int, str]
    """Why an object was not downloaded, by position; as the next two."""
    labels: dict[int, int] = dataclasses.field(default_factory=dict)
    probabilities: dict[int, list[float]] = dataclasses.field(default_factory=dict)

    def rows(self, bundle: str, reading: Reading) -> Iterator[table.Row]:
        """Yield the row of each object."""
        for at, name in enumerate(self.shard.listing.names):
            known = bundle, "", content_of(self.shard.listing, at)
            if at in self.labels:
                label = self.images.classes[self.labels[at]]
                yield table.Row(name, label, *known, tuple(self.probabilities[at]))
            else:
                reason = self.lost.get(at) or _reason(Path(self.images.paths[at]), reading)
                yield table.Row(name, "", bundle, reason, known[2], ())


def predict_share(request: PredictionRequest, world: World | None = None) -> None:
    """Predict this rank's shards; the first rank plans before, and makes the table after.

    No `world` means a single process. Raise InputError if an input is invalid, UnavailableError if
    a store does not respond: another attempt then computes only what is missing.
    """
    started, listing = time.monotonic(), Listing()
    world = world or alone(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    subject, digest = read_bundle(request.bundle, allow_code=request.options.allow_code)
    destination = Destination(request.table, subject.info.classes, digest)

    def plan() -> tuple[str, str, int]:
        nonlocal listing
        destination.store.prepare()
        listing = list_objects(request, destination)
        return digest, *destination.plan(listing)

    first_digest, todo, missing = world.from_first(plan)
    if digest != first_digest:
        raise UnavailableError(f"the champion of {request.bundle} has changed: run again")
    world.print(f"{len(listing):,} objects, {missing:,} of them to predict")
    if missing:
        _predict(request, destination, subject, todo, world)
    world.barrier()
    if world.first:
        destination.join(listing, missing, request.source, time.monotonic() - started)


def _predict(
    request: PredictionRequest,
    destination: Destination,
    subject: Subject,
    todo: str,
    world: World,
) -> None:
    """Predict this rank's shards of a list, and write a part for each.

    The next one is downloaded meanwhile.
    """
    options, info = request.options, subject.info
    source = open_source(request.source, SourceOptions(symlinks=options.symlinks))
    reading, begun = info.reading._replace(on_bad_image="skip"), deque[Local]()

    def begin(local: Local) -> Work:
        begun.append(local)
        for keys in loader.fixed_batches(local.images, options.batch_size, 0, 1):
            yield local.images, keys

    def work() -> Work:
        with ThreadPoolExecutor(1) as pool:
            ahead = None
            shards = destination.shards(todo, options.shard_images)
            for shard in islice(shards, world.rank, None, world.size):
                arguments = source, shard, above / str(shard.number), info.classes, reading
                before, ahead = ahead, pool.submit(_download, *arguments)
                if before:
                    yield from begin(before.result())
            if ahead:
                yield from begin(ahead.result())

    def finish(local: Local) -> None:
        file = local.folder / f"part{destination.suffix}"
        table.write(file, info.classes, local.rows(destination.bundle, reading))
        destination.store.put(file, destination.part(todo, local.shard.number))
        shutil.rmtree(local.folder)
        print(f"shard {local.shard.number:,}: {len(local.images):,} objects", flush=True)

    scratch = Path(scratch_dir())
    with writing(scratch, MORE_STORAGE), contextlib.ExitStack() as stack:
        scratch.mkdir(parents=True, exist_ok=True)
        above = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
        for batch in scored(subject.network, info, work(), world, reading):
            while begun[0].images is not batch.images:
                finish(begun.popleft())
            positions = batch.positions.tolist()
            rows = batch.scores.double().softmax(1).tolist()
            begun[0].labels.update(zip(positions, batch.scores.argmax(1).tolist(), strict=True))
            begun[0].probabilities.update(zip(positions, rows, strict=True))
        for local in begun:
            finish(local)


def _download(
    source: Source, shard: Shard, folder: Path, classes: tuple[str, ...], reading: Reading
) -> Local:
    """Download the objects of a shard under numbers; raise UnavailableError, or as `Transfer.run`.

    Objects that cannot be downloaded are lost, unless that is so for all.
    """
    numbers = [str(at) for at in range(len(shard.listing))]
    origins = dict(zip(numbers, shard.listing.names, strict=True))
    listing = dataclasses.replace(shard.listing, names=numbers, origins=origins)
    small = [at for at, size in enumerate(listing.sizes) if size <= reading.most_bytes]
    large = dict.fromkeys({*range(len(listing))} - {*small}, "it is larger than any image")
    lost: dict[int, str] = {}

    def fetch(some: list[int], where: str) -> Path:
        stage = FileStage(folder / where, listing, folder)
        folder.mkdir(parents=True, exist_ok=True)
        stage.open()
        try:
            context = Context(source, SyncOptions(), Retry(), lambda *_: None)
            Transfer(context, stage).run(some)
        except Changed as error:
            raise UnavailableError(f"{error} changed while this ran: run again") from None
        finally:
            stage.close()
        return stage.tree

    try:
        tree = fetch(small, "all")
    except KfpDdpError as error:
        if error.retryable:
            raise
        for at in small:
            try:
                tree = fetch([at], "each")
            except KfpDdpError as one:
                lost[at] = f"{LOST}{one_line(one)}"
        if len(lost) == len(small):
            raise
    paths = tuple(f"{tree}/{number}" for number in numbers)
    return Local(shard, folder, Index(tree, classes, paths, (0,) * len(paths)), {**large, **lost})


def _reason(path: Path, reading: Reading) -> str:
    """Return why an image cannot be read, as the decoder has it."""
    try:
        decoder.decode(content(Where(str(path)), reading.most_bytes), reading)
    except (OSError, ValueError) as error:
        return one_line(getattr(error, "strerror", None) or error)
    return "it is not as images=strict of the training requires"
