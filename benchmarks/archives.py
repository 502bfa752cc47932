"""An epoch from archives (pack=tar) and from files, where reading is what takes time.

Images of 16 kB, two loader processes, decoding to 64 px, a buffer of a third of the data; wall
time, the page cache dropped before each epoch.

- `tar_vs_files_slow`, `tar_vs_imagefolder_slow`: each request that the page cache does not answer
  waits 5 ms, as on network storage: a file costs one, a piece of an archive of 2 MB one. The time
  is slept in the reader; webdataset, which reads in sequence, is let off it.
- `tar_vs_files_slow_read`: the same without decoding, one loader: requests are all that counts.
- `tar_vs_files_cold`, `tar_vs_imagefolder_cold`, `tar_vs_webdataset_cold`: this machine's disk.
"""

import contextlib
import errno
import importlib
import io
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.rounds import measure, ratio, table

IMAGES, CLASSES, BATCH, SIZE, ROUNDS, WORKERS = 1000, 20, 64, 64, 3, 2
DELAY = 0.005


def run() -> dict[str, float]:
    """Measure and return the figures by name."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        home = Path(folder)
        photographs(home / "files")
        archives = _packed(home)
        calls = {
            "kfp-ddp, archives": _ours(archives),
            "kfp-ddp, files": _ours(home / "files"),
            "ImageFolder": _imagefolder(home / "files"),
        }
        peer = _webdataset(home)
        if peer:
            calls["webdataset"] = peer
        os.sync()  # what is not yet written cannot be dropped
        cold = {name: _cold(home, call) for name, call in calls.items()}
        disk = measure(cold, ROUNDS, time.perf_counter)
        reads = {
            "archives": _delayed(_cold(home, _read(archives))),
            "files": _delayed(_cold(home, _read(home / "files"))),
        }
        read = measure(reads, ROUNDS, time.perf_counter)
        slow = measure({n: _delayed(call) for n, call in cold.items()}, ROUNDS, time.perf_counter)
    title = f"{IMAGES} JPEGs of 16 kB to {SIZE} px, {WORKERS} loaders, wall time, cold page cache"
    table(title, disk, IMAGES, "image")
    table(f"the same, {DELAY * 1000:g} ms a request", slow, IMAGES, "image")
    table(f"reading alone, {DELAY * 1000:g} ms a request, one loader", read, IMAGES, "image")
    figures = {"tar_vs_files_slow_read": ratio(read, "archives", "files")}
    for kind, seconds in (("slow", slow), ("cold", disk)):
        for name, peer_name in (("files", "kfp-ddp, files"), ("imagefolder", "ImageFolder")):
            figures[f"tar_vs_{name}_{kind}"] = ratio(seconds, "kfp-ddp, archives", peer_name)
    if peer:
        figures["tar_vs_webdataset_cold"] = ratio(disk, "kfp-ddp, archives", "webdataset")
    else:
        print("webdataset is not installed: no figure against it")
    return figures


def photographs(root: Path) -> None:
    """JPEG files of about 16 kB in class folders below `root`/train, and a few below val."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_sample_images

    sources = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    draw = np.random.default_rng(0)
    for split, count in (("train", IMAGES), ("val", CLASSES)):
        for number in range(count):
            folder = root / split / f"class{number % CLASSES:02}"
            folder.mkdir(parents=True, exist_ok=True)
            left, top = int(draw.integers(0, 640 - 256)), int(draw.integers(0, 427 - 256))
            part = sources[number % 2].crop((left, top, left + 256, top + 256))
            part.save(folder / f"{number:05}.jpg", quality=75)


def _packed(home: Path) -> Path:
    from kfp_ddp.datasets.options import SyncOptions
    from kfp_ddp.datasets.sync import sync

    return sync(str(home / "files"), home / "claim", SyncOptions(pack="tar")).path


def _dealt(data: Path) -> tuple[Any, Any, Any]:
    """The run's configuration, its training images and what deals them."""
    from kfp_ddp.pictures.splits import splits_of
    from kfp_ddp.training.data.sampler import ResumableSampler, windows_of
    from kfp_ddp.training.spec.config import TrainConfig

    third = sum(path.stat().st_size for path in data.rglob("*") if path.is_file()) / 3 / 2**20
    config = TrainConfig.create(
        data=str(data),
        output_dir=str(data / "out"),
        image_size=SIZE,
        batch_size=BATCH,
        shuffle_buffer_mb=third,
    )
    index = splits_of(data).train
    windows = windows_of(index.slices, config)
    return config, index, ResumableSampler(len(index), BATCH, BATCH, 0, 1, 0, windows)


def _ours(data: Path) -> Callable[[], object]:
    """One epoch of our loaders, to batches of uint8."""
    from kfp_ddp.training.data.loader import Images, loader

    config, index, sampler = _dealt(data)

    def epoch() -> int:
        images = Images(index, config, for_training=True)
        return sum(
            len(batch.targets) for batch in loader(images, sampler.epoch(0), WORKERS, pin=False)
        )

    return epoch


def _read(data: Path) -> Callable[[], object]:
    """The bytes of an epoch's images, in its order."""
    from kfp_ddp.pictures import shards
    from kfp_ddp.pictures.shards import ReadAhead

    _, index, sampler = _dealt(data)

    def epoch() -> int:
        ahead = ReadAhead(index.slices) if index.slices else None
        read = 0
        for keys in sampler.epoch(0):
            if ahead:
                ahead.begin(keys.ahead)
            read += sum(len(shards.content(index.where(at), 1 << 30)) for _, at in keys)
        return read

    return epoch


def _transforms() -> Any:
    from torchvision.transforms import v2

    return v2.Compose(
        [v2.PILToTensor(), v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()]
    )


def _imagefolder(data: Path) -> Callable[[], object]:
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(str(data / "train"), _transforms(), loader=_opened)

    def epoch() -> int:
        batches = DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=WORKERS)
        return sum(len(targets) for _, targets in batches)

    return epoch


def _opened(path: str) -> Any:
    """As torchvision's own loader, with the delay where it is measured."""
    from PIL import Image

    from kfp_ddp.pictures import shards

    content = shards.content(shards.Where(path), 1 << 30)
    return Image.open(io.BytesIO(content)).convert("RGB")


def _webdataset(home: Path) -> Callable[[], object] | None:
    """The same images as webdataset's tutorial has them: shuffled shards, a buffer of samples."""
    try:
        webdataset = importlib.import_module("webdataset")
    except ImportError:
        return None
    from torch.utils.data import DataLoader

    names = sorted((home / "files" / "train").rglob("*.jpg"), key=lambda path: path.name)
    shards = [home / f"others-{number}.tar" for number in range(8)]
    for number, shard in enumerate(shards):
        with tarfile.open(shard, "w") as archive:
            for path in names[number :: len(shards)]:
                archive.add(path, path.name)
                label = path.parent.name.removeprefix("class").encode()
                about = tarfile.TarInfo(f"{path.stem}.cls")
                about.size = len(label)
                archive.addfile(about, io.BytesIO(label))
    change = _transforms()

    def epoch() -> int:
        samples = webdataset.WebDataset(
            [str(shard) for shard in shards], shardshuffle=len(shards), empty_check=False
        )
        decoded = samples.shuffle(IMAGES // 3).decode("pil").to_tuple("jpg", "cls")
        images = decoded.map_tuple(change, int).batched(BATCH)
        batches = DataLoader(images, batch_size=None, num_workers=WORKERS)
        return sum(len(targets) for _, targets in batches)

    return epoch


def _cold(home: Path, call: Callable[[], object]) -> Callable[[], object]:
    def dropped() -> object:
        for path in home.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return call()

    return dropped


def _delayed(call: Callable[[], object]) -> Callable[[], object]:
    def slept() -> object:
        with _slow_requests():
            return call()

    return slept


@contextlib.contextmanager
def _slow_requests() -> Iterator[None]:
    """Let what the page cache does not hold be had after a pause only."""
    from kfp_ddp.pictures import shards
    from kfp_ddp.training.data import image_files

    pread, content = shards.pread, shards.content

    def slow_pread(file: str, length: int, offset: int) -> bytes:
        if not _is_cached(file, length, offset):
            time.sleep(DELAY)
        return pread(file, length, offset)

    def slow_content(where: shards.Where, most: int) -> bytes:
        if where.size < 0 and not _is_cached(where.file, os.stat(where.file).st_size, 0):
            time.sleep(DELAY)
        return content(where, most)

    with (
        mock.patch.object(shards, "pread", slow_pread),
        mock.patch.object(shards, "content", slow_content),
        mock.patch.object(image_files, "content", slow_content),
    ):
        yield


def _is_cached(file: str, length: int, offset: int) -> bool:
    with open(file, "rb") as opened:
        try:
            size = os.preadv(opened.fileno(), [bytearray(length)], offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
            return False
        return size == min(length, os.fstat(opened.fileno()).st_size - offset)
