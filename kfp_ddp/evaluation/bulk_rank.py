"""One rank of a batch prediction: downloads its shards, predicts them, and writes their parts."""

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kfp_ddp.core.errors import KfpDdpError, UnavailableError, writing
from kfp_ddp.core.folders import make_own, scratch_dir
from kfp_ddp.core.log import log
from kfp_ddp.core.text import one_line
from kfp_ddp.datasets.context import Context
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.stage import FileStage
from kfp_ddp.datasets.transfer import Transfer
from kfp_ddp.evaluation import bulk_sample
from kfp_ddp.evaluation.bulk import LOST, Row, Table, content_of, list_objects
from kfp_ddp.evaluation.drift import Sample, compare
from kfp_ddp.evaluation.evaluator import Subject, read_bundle
from kfp_ddp.evaluation.predict import Work, scored
from kfp_ddp.evaluation.request import PredictionRequest
from kfp_ddp.models import doubt
from kfp_ddp.models.doubt import WORDS, Rows, Thresholds, read_reference
from kfp_ddp.models.signature import Signer, signer_of
from kfp_ddp.pictures import decoder
from kfp_ddp.pictures.reading import Reading
from kfp_ddp.pictures.shards import Where, content
from kfp_ddp.pictures.splits import Index
from kfp_ddp.runs.workspace import MORE_STORAGE
from kfp_ddp.storage.kinds import open_source
from kfp_ddp.storage.listing import Listing
from kfp_ddp.storage.source import Changed, Retry, Source, SourceOptions
from kfp_ddp.training.data import loader
from kfp_ddp.training.distributed import World, alone, gpu_or_cpu, half_precision


class Local(NamedTuple):
    """A shard with its files on this disk."""

    number: int
    listing: Listing
    folder: Path
    images: Index
    known: dict[int, Row]
    """By position: class and probabilities, or why an object was not downloaded."""

    def rows(self, bundle: str, reading: Reading) -> Iterator[Row]:
        """Yield the row of each object."""
        for at, name in enumerate(self.listing.names):
            row = self.known.get(at) or {"reason": _reason(self.images.paths[at], reading)}
            own = {"name": name, "bundle": bundle, "object": content_of(self.listing, at)}
            yield {"class": "", "reason": "", "sure": "", **row, **own}


def predict_share(
    request: PredictionRequest, world: World | None = None, signer: Signer | None = None
) -> None:
    """Predict this rank's shards; the first rank plans before, and makes the table after.

    No `world` means a single process. The bundle must be signed by `signer`, else by the key that
    the request names, if any. Raise InputError if an input is invalid, UnavailableError if
    a store does not respond: another attempt then computes only what is missing.
    """
    started = time.monotonic()
    listing = Listing()
    world = world or alone(gpu_or_cpu())
    signer = signer or signer_of(request.bundle_key, "bundle_key")
    subject, bundle = read_bundle(request.bundle, signer, allow_code=request.allow_code)
    digest = bundle.digest
    table = Table(request.table, subject.info.classes, digest)
    reference: Rows | None = None
    left_out: dict[str, int] = {}

    def plan() -> tuple[str, str, int]:
        nonlocal listing, left_out, reference
        reference = read_reference(bundle)
        table.store.prepare()
        listing, left_out = list_objects(request, table)
        return digest, *table.plan(listing)

    first_digest, todo, missing = world.from_first(plan)
    if digest != first_digest:
        raise UnavailableError(f"the champion of {request.bundle} has changed: run again")
    world.print(f"{len(listing):,} objects, {missing:,} of them to predict")
    if missing:
        _predict(request, table, subject, todo, world, doubt.read(bundle))
    if world.to_first(missing) is not None:  # when all ranks are done
        sample, new = bulk_sample.read(table, listing, reference)
        drift = {"drift": compare(reference, sample), "drift_of_new": compare(reference, new)}
        bulk_sample.store(table, table.name, listing, sample)
        seconds = round(time.monotonic() - started, 1)
        record = {"source": request.source, "computed": missing, "seconds": seconds}
        table.join(listing, record | {"left_out": left_out, **drift})


def _predict(
    request: PredictionRequest,
    table: Table,
    subject: Subject,
    todo: str,
    world: World,
    thresholds: Thresholds,
) -> None:
    """Predict this rank's shards of a list; the next one is downloaded meanwhile."""
    for note in thresholds.notes:
        world.print(note)
    sample = Sample()
    source = open_source(request.source, SourceOptions(requester_pays=request.requester_pays))
    info = subject.info
    begun = deque[Local]()
    reading = info.reading._replace(on_bad_image="skip")
    precision = request.precision
    if precision == "auto":
        precision = "bf16" if half_precision(world.device) == "bf16" else "fp32"

    def work() -> Work:
        shards = enumerate(table.shards(todo, request.shard_images))
        mine = islice(shards, world.rank, None, world.size)
        with ThreadPoolExecutor(1) as pool:
            # `map` would start all downloads at once.
            coming = (pool.submit(_download, source, *one, above, reading) for one in mine)
            ahead = next(coming, None)
            while ahead is not None:
                begun.append(local := ahead.result())
                ahead = next(coming, None)
                for keys in loader.fixed_batches(local.images, request.batch_size, 0, 1):
                    yield local.images, keys

    def finish(local: Local) -> None:
        file = local.folder / f"part{table.suffix}"
        table.write(file, local.rows(table.bundle, reading))
        name = f"{todo}-{local.number:07d}{table.suffix}"
        bulk_sample.store(table, name, local.listing, sample)
        table.store.put(file, name)
        shutil.rmtree(local.folder)
        log.info(f"shard {local.number:,}: {len(local.images):,} objects")

    scratch = scratch_dir() / "predictions"
    with writing(scratch, MORE_STORAGE), contextlib.ExitStack() as stack:
        make_own(scratch)
        above = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
        for batch in scored(subject.network, info, work(), world, reading, precision):
            while begun[0].images is not batch.images:
                finish(begun.popleft())
            labels = batch.scores.argmax(1).tolist()
            rows = batch.scores.double().softmax(1).tolist()
            positions = batch.positions.tolist()
            names = [begun[0].listing.names[at] for at in positions]
            sample.add(names, batch.scores)
            sure = thresholds.sure(batch.scores.numpy())
            for at, label, row, answer in zip(positions, labels, rows, sure, strict=True):
                values = dict(zip(table.probabilities, row, strict=True))
                about = {"class": info.classes[label], "sure": WORDS[answer]}
                begun[0].known[at] = {**about, **values}
        for local in begun:
            finish(local)


def _download(source: Source, number: int, shard: Listing, above: Path, reading: Reading) -> Local:
    """Download the objects of a shard under numbers; raise UnavailableError, or as `Transfer.run`.

    Objects that cannot be downloaded are lost, unless that is so for all.
    """
    folder = above / str(number)
    numbers = [str(position) for position in range(len(shard))]
    origins = dict(zip(numbers, shard.names, strict=True))
    folder.mkdir()
    stage = FileStage(folder / "files", dataclasses.replace(shard, names=numbers, origins=origins))
    stage.open()
    large = {"reason": "it is larger than any image of max_pixels"}
    lost = {at: large for at, size in enumerate(shard.sizes) if size > reading.most_bytes}
    context = Context(source, SyncOptions(), Retry(), lambda *_: None)

    def transfer(positions: Sequence[int]) -> None:
        """Download these; if one of several cannot be, those that are missing one by one."""
        try:
            Transfer(context, stage).run(positions)
        except Changed as error:
            raise UnavailableError(f"{error} changed while this ran: run again") from None
        except KfpDdpError as error:
            if error.retryable:
                raise
            if len(positions) == 1:
                lost[positions[0]] = {"reason": f"{LOST}{one_line(error)}"}
            else:
                for at in [one for one in positions if not stage.path(one).exists()]:
                    transfer([at])
            if len(lost) == len(shard):
                raise

    with contextlib.closing(stage):
        transfer([at for at in range(len(shard)) if at not in lost])
    paths = tuple(str(stage.path(at)) for at in range(len(shard)))
    return Local(number, shard, folder, Index(stage.tree, (), paths, (0,) * len(paths)), lost)


def _reason(path: str, reading: Reading) -> str:
    """Return why an image cannot be read, as the decoder has it."""
    try:
        decoder.decode(content(Where(path), reading.most_bytes), reading)
    except (OSError, ValueError) as error:
        return one_line(getattr(error, "strerror", None) or error)
    return "it is not as images=strict of the training requires"
