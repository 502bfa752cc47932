"""ResNet-50 at 224 px in bf16 on one GPU, wall time, on generated photographs; needs a GPU.

- `images_per_s`, `mfu`: our whole step from JPEG files, with a loader process for each core.
- `images_per_s_cached`: the same from the decoded cache.
- `real_vs_synthetic`: the better of the two against the same steps on a batch that is on the GPU
  already; 1.00 is a loader that is never waited for.
- `vs_torchvision`: against the loop of torchvision's references/classification/train.py in its
  published form with --amp, rewritten here: its presets, sampler and workers, NCHW, float16 with
  a scaler, accuracy and meters in each step.

Peers have processes of their own, and take turns.
"""

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.input import photographs
from benchmarks.rounds import add_to_meters, apart, ratio, table, take_turns
from benchmarks.training import steps_of_ours

IMAGES, BATCH, STEPS, ROUNDS = 4096, 256, 20, 5


def run() -> dict[str, float]:
    """Measure and return the figures by name; none without a GPU."""
    import torch

    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure")
        return {}
    return compare("resnet50", 224, BATCH, STEPS, IMAGES)


def compare(name: str, size: int, batch: int, steps: int, images: int) -> dict[str, float]:
    """All sides on the device there is: on a CPU it only tries that they run."""
    fields: dict[str, Any] = {"batch_size": batch, "device": "auto", "precision": "bf16"}
    fields["cache_gb"] = 0
    cores = os.cpu_count() or 1
    wall = time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        root = photographs(Path(folder) / "data", images)
        where, loaded = (root, name, size, steps), fields | {"workers": cores}
        with (
            apart(steps_of_ours, *where, loaded, clock=wall) as jpeg,
            apart(steps_of_ours, *where, loaded | {"cache_gb": 64}, clock=wall) as kept,
            apart(steps_of_ours, *where, fields, True, clock=wall) as synthetic,
            apart(_torchvision, root, name, size, batch, cores, steps, clock=wall) as reference,
        ):
            calls = {
                "kfp-ddp, JPEG": jpeg,
                "kfp-ddp, decoded cache": kept,
                "kfp-ddp, the same batch again": synthetic,
                "torchvision references": reference,
            }
            seconds = take_turns(calls, ROUNDS)
    table(f"{name} at {size} px, batch {batch}", seconds, batch * steps, "image")
    rates = {side: batch * steps / statistics.median(took) for side, took in seconds.items()}
    best = max(("kfp-ddp, JPEG", "kfp-ddp, decoded cache"), key=rates.__getitem__)
    figures = {
        "images_per_s": rates["kfp-ddp, JPEG"],
        "images_per_s_cached": rates["kfp-ddp, decoded cache"],
        "real_vs_synthetic": ratio(seconds, best, "kfp-ddp, the same batch again"),
        "vs_torchvision": ratio(seconds, "kfp-ddp, JPEG", "torchvision references"),
    }
    return figures | _mfu(name, size, rates["kfp-ddp, JPEG"])


def _mfu(name: str, size: int, images_per_s: float) -> dict[str, float]:
    import torch

    from kfp_ddp.training.config import TrainConfig
    from kfp_ddp.training.meter import peak_of, training_flops

    peak = peak_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else 0.0
    if not peak:
        return {}
    config = TrainConfig.create(data="", output_dir="", model=name, image_size=size)
    return {"mfu": training_flops(config, 2) * images_per_s / (peak * 1e12)}


def _torchvision(
    root: Path, name: str, size: int, batch: int, workers: int, steps: int
) -> Callable[[], None]:
    """`train_one_epoch()` of torchvision's references, `steps` batches at a time."""
    import torch
    from torch.utils.data import DataLoader, RandomSampler
    from torchvision import datasets, models, transforms

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    network = models.get_model(name, weights=None, num_classes=1000).to(device)
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4)
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    preset = transforms.Compose(
        [
            transforms.RandomResizedCrop(size),
            transforms.RandomHorizontalFlip(0.5),
            transforms.PILToTensor(),
            transforms.ConvertImageDtype(torch.float),
            transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        ]
    )
    dataset = datasets.ImageFolder(str(root / "train"), preset)
    loader = DataLoader(
        dataset,
        batch_size=batch,
        sampler=RandomSampler(dataset),
        num_workers=workers,
        pin_memory=device.type == "cuda",
    )
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    seen = [0.0, 0.0, 0.0]
    network.train()

    def some() -> None:
        for pixels, truth in itertools.islice(batches, steps):
            image, target = pixels.to(device), truth.to(device)
            with torch.autocast(device.type, half):
                output = network(image)
                loss = criterion(output, target)
            optimizer.zero_grad()
            scaled: torch.Tensor = scaler.scale(loss)
            torch.autograd.backward(scaled)
            scaler.step(optimizer)
            scaler.update()
            with torch.inference_mode():
                add_to_meters(seen, loss, output, target)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return some
