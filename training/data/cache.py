"""Decoded images in a memory-mapped file that the ranks of a node and all epochs share."""

import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.files import atomic_write
from kfp_ddp.core.folders import is_own
from kfp_ddp.pictures.shards import Where
from kfp_ddp.pictures.splits import Index
from kfp_ddp.training.data import transforms
from kfp_ddp.training.data.image_files import Findings, examine
from kfp_ddp.training.spec.config import TrainConfig


class Cache:
    """The prepared images of a split: i is in row i // parts of part i % parts, of a local rank."""

    def __init__(self, folder: Path, split: str, samples: int, parts: int) -> None:
        self.folder = folder
        self.split = split
        self.samples = samples
        self.parts = parts
        self._open: list[tuple[Tensor, list[tuple[int, int, int]]]] = []

    def build(
        self, where: Callable[[int], Where], config: TrainConfig, for_training: bool, part: int
    ) -> Findings:
        """Store the images of a part, at `where(position)`, unless stored; raise a KfpDdpError."""
        mine = range(part, self.samples, self.parts)
        pixels, table = self._files(part)
        self._refuse_if_shared(make=True)
        if pixels.exists() and table.exists():
            return Findings(0, (), 0, "")
        rows: list[tuple[int, int, int]] = []
        # Nodes may share the folder; then each writes the same content.
        aside = pixels.with_suffix(f".{socket.gethostname()}-{os.getpid()}.tmp")
        try:
            with atomic_write(pixels, aside) as file:

                def keep(position: int, image: Tensor | None) -> None:
                    if image is None:
                        rows.append((file.tell(), 0, 0))
                        return
                    ready = transforms.prepare(image, config, for_training)
                    rows.append((file.tell(), ready.shape[1], ready.shape[2]))
                    file.write(ready.permute(1, 2, 0).contiguous().numpy().tobytes())

                findings = examine(where, mine, config, keep)
            with atomic_write(table, aside) as file:
                torch.save(rows, file)
        except OSError as error:
            raise self._unusable(error) from None
        return findings

    def read(self, position: int, path: str | Where) -> Tensor:
        """Return the prepared image, uint8 [3, H, W], without a copy; raise InputError."""
        if not self._open:
            self._open = [self._map(part) for part in range(self.parts)]
        pixels, rows = self._open[position % self.parts]
        start, height, width = rows[position // self.parts]
        if height == 0:
            raise InputError(f"cannot decode {path}: replace or remove it in the source")
        stored = pixels[start : start + height * width * 3]
        return stored.view(height, width, 3).permute(2, 0, 1)

    def remove(self) -> None:
        """Delete the files; mapped images remain readable."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _refuse_if_shared(self, make: bool = False) -> None:
        """Raise StorageError if others can write to the folder: its name is predictable."""
        try:
            if make:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            own = is_own(self.folder)
        except OSError as error:
            raise self._unusable(error) from None
        if not own:
            raise StorageError(
                f"the cache {self.folder} is writable by other users: "
                "remove it, or set cache_dir to another folder, or cache_gb=0"
            )

    def _unusable(self, error: OSError) -> StorageError:
        return StorageError(
            f"cannot cache decoded images in {self.folder}: {error.strerror}; "
            "set cache_dir to a folder with free space, or cache_gb=0"
        )

    def _map(self, part: int) -> tuple[Tensor, list[tuple[int, int, int]]]:
        self._refuse_if_shared()
        pixels, table = self._files(part)
        size = pixels.stat().st_size
        if size == 0:  # fewer images than parts, or none is readable
            return torch.empty(0, dtype=torch.uint8), torch.load(table, weights_only=True)
        mapped = torch.from_file(str(pixels), shared=False, size=size, dtype=torch.uint8)
        return mapped, torch.load(table, weights_only=True)

    def _files(self, part: int) -> tuple[Path, Path]:
        stem = f"{self.split}-{part}-of-{self.parts}"
        return self.folder / f"{stem}.u8", self.folder / f"{stem}.rows"

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": []}


def decoded_bytes(config: TrainConfig, splits: Sequence[Index]) -> int:
    """Estimate the bytes of the decoded images of both splits."""
    return sum(
        len(index) * transforms.prepared_bytes(config, for_training)
        for index, for_training in zip(splits, (True, False), strict=True)
    )


def folder_for(config: TrainConfig, splits: Sequence[Index]) -> Path | None:
    """Return the folder of decoded images that a resumed run finds again; None above `cache_gb`."""
    expected = decoded_bytes(config, splits)
    if expected > config.cache_gb * 1e9:
        return None
    base = Path(config.cache_dir or tempfile.gettempdir())
    name = hashlib.sha256()
    shape = (config.image_size, config.train_image_size, config.start_image_size, config.augment)
    name.update(
        repr((os.path.abspath(config.output_dir), config.model, *shape, *config.reading)).encode()
    )
    for index in splits:
        for path in index.slices.files if index.slices else index.paths:
            about = os.stat(path)
            name.update(f"{path}\0{about.st_size}\0{about.st_mtime_ns}\0".encode())
        if index.slices:
            name.update(repr((index.paths, *index.slices)).encode())
    folder = base / f"kfp-ddp-cache-{os.geteuid()}-{name.hexdigest()[:16]}"
    is_new = not folder.is_dir() and base.is_dir()
    if is_new and shutil.disk_usage(base).free < 1.1 * expected:
        raise StorageError(
            f"not enough space to cache {expected / 1e9:.2f} GB of decoded images in {base}: "
            "set cache_dir to another folder, or cache_gb=0"
        )
    return folder
