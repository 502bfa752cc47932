"""The input pipeline to 224 px on one core, against torchvision's ImageFolder.

- `jpeg_vs_imagefolder`: from JPEG files of about 500x375 pixels, random resized crop and flip,
  batched and normalised; the peer is ImageFolder with the v1 transforms of pytorch/examples.
- `large_jpeg_vs_imagefolder`: the same from JPEG files of 2048x1536, which we decode at a half or a
  quarter where the crop has pixels to spare.
- `cache_vs_imagefolder`: as the first from our memory-mapped file of decoded images.
- `cache_vs_imagefolder_v2_uint8`: against torchvision's fastest own transforms (v2, uint8 tensors).

Then what `benchmarks.archives` measures of archives and files where reading takes time.

CPU time of one thread, so that it holds per core; each in a process of its own, ours with the
allocator as a rank sets it. Photographs are cut from the two that scikit-learn ships.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import archives
from benchmarks.rounds import apart, ratio, table, take_turns

IMAGES, LARGE, BATCH, SIZE, ROUNDS = 256, 16, 64, 224, 7


def photographs(
    root: Path, count: int, classes: int = 2, sides: tuple[int, int] = (500, 375)
) -> Path:
    """JPEG files of these sides in class folders below `root`/train, a quarter as many in val."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_sample_images

    sources = load_sample_images().images
    draw = np.random.default_rng(0)
    for split, number in (("train", count), ("val", count // 4)):
        for i in range(number):
            pixels = Image.fromarray(sources[i % 2])
            width = int(draw.integers(400, 640))
            height = width * 3 // 4
            left = int(draw.integers(0, 641 - width))
            top = int(draw.integers(0, max(1, 428 - height)))
            part = pixels.crop((left, top, left + width, top + height)).resize(sides)
            folder = root / split / f"class{i % classes}"
            folder.mkdir(parents=True, exist_ok=True)
            part.save(folder / f"{i:05d}.jpg", quality=92)
    return root


def run() -> dict[str, float]:
    """Measure and return the figures by name."""
    v1, v2 = "ImageFolder, v1 transforms", "ImageFolder, v2 transforms on uint8"
    with tempfile.TemporaryDirectory() as folder:
        root = photographs(Path(folder) / "data", IMAGES)
        large = photographs(Path(folder) / "large", LARGE, sides=(2048, 1536))
        with (
            apart(_ours, root, False) as jpeg,
            apart(_ours, root, True) as cache,
            apart(_imagefolder, root, False) as peer,
            apart(_imagefolder, root, True) as peer_v2,
        ):
            calls = {
                "kfp-ddp, JPEG": jpeg,
                "kfp-ddp, decoded cache": cache,
                v1: peer,
                v2: peer_v2,
            }
            seconds = take_turns(calls, ROUNDS)
        with apart(_ours, large, False) as jpeg, apart(_imagefolder, large, False) as peer:
            from_large = take_turns({"kfp-ddp, JPEG": jpeg, v1: peer}, ROUNDS)
    table(f"{IMAGES} JPEGs of 500x375 to {SIZE} px, 1 thread, CPU time", seconds, IMAGES, "image")
    table(f"{LARGE} JPEGs of 2048x1536", from_large, LARGE, "image")
    return {
        "jpeg_vs_imagefolder": ratio(seconds, "kfp-ddp, JPEG", v1),
        "jpeg_vs_imagefolder_v2_uint8": ratio(seconds, "kfp-ddp, JPEG", v2),
        "large_jpeg_vs_imagefolder": ratio(from_large, "kfp-ddp, JPEG", v1),
        "cache_vs_imagefolder": ratio(seconds, "kfp-ddp, decoded cache", v1),
        "cache_vs_imagefolder_v2_uint8": ratio(seconds, "kfp-ddp, decoded cache", v2),
        **archives.run(),
    }


def _ours(root: Path, cached: bool) -> Callable[[], object]:
    """One epoch of our loader in this process, to normalised float32."""
    import torch

    from kfp_ddp.pictures.splits import scan
    from kfp_ddp.training.data.cache import Cache
    from kfp_ddp.training.data.loader import Images, Pixels, loader, to_device
    from kfp_ddp.training.data.sampler import ResumableSampler
    from kfp_ddp.training.distributed import keep_freed
    from kfp_ddp.training.spec.config import TrainConfig

    torch.set_num_threads(1)
    keep_freed()
    config = TrainConfig.create(data=str(root), output_dir=str(root / "out"), image_size=SIZE)
    index = scan(root / "train")
    cache = None
    if cached:
        cache = Cache(root / "cache", "train", len(index), parts=1)
        cache.build(index.where, config, True, 0)
    batch = min(BATCH, len(index))
    sampler = ResumableSampler(len(index), batch, batch, 0, 1, seed=0)
    images = Images(index, config, for_training=True, cache=cache)

    def epoch() -> int:
        batches = iter(loader(images, sampler.epoch(0), workers=0, pin=False))
        moved = to_device(batches, torch.device("cpu"), Pixels())
        return sum(len(batch.targets) for batch in moved)

    return epoch


def _imagefolder(root: Path, v2: bool) -> Callable[[], object]:
    """One epoch as pytorch/examples' imagenet/main.py reads it, or with v2 on uint8 tensors."""
    import torch
    from torch.utils.data import DataLoader
    from torchvision import transforms as v1
    from torchvision.datasets import ImageFolder

    torch.set_num_threads(1)
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    steps: list[Any]
    if v2:
        from torchvision.transforms import v2 as new

        steps = [
            new.PILToTensor(),
            new.RandomResizedCrop(SIZE, antialias=True),
            new.RandomHorizontalFlip(),
            new.ToDtype(torch.float32, scale=True),
            new.Normalize(mean, std),
        ]
    else:
        steps = [
            v1.RandomResizedCrop(SIZE),
            v1.RandomHorizontalFlip(),
            v1.ToTensor(),
            v1.Normalize(mean=mean, std=std),
        ]
    dataset = ImageFolder(str(root / "train"), v1.Compose(steps))
    batches = DataLoader(dataset, batch_size=BATCH, shuffle=True)

    def epoch() -> int:
        return sum(len(targets) for _, targets in batches)

    return epoch
