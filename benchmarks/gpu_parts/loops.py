"""Whole training loops on one GPU, one after the other: their memory would not fit at once."""

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.rounds import add_to_meters, apart
from benchmarks.training import steps_of_ours

STEPS = 5
"""Between two looks at the clock."""


def rate(images: int, seconds: float, make: Callable[..., Callable[[], None]], *of: Any) -> float:
    """Images a second of `make(*of)()`, which takes so many, called on and on for `seconds`.

    The first third is left out: batches that lay ready, and what is tried and compiled at first.
    """
    with apart(make, *of, clock=time.perf_counter) as ask:
        ask()
        began = time.perf_counter()
        took: list[float] = []
        while len(took) < 4 or time.perf_counter() - began < seconds:
            took.append(ask())
    return images / statistics.median(took[len(took) // 3 :])


def fitting(root: str, name: str, size: int, fields: dict[str, Any]) -> int:
    """The largest batch of 512, 256, ... that the GPU has memory for, at most that of `fields`."""
    import torch

    batch = int(fields["batch_size"])
    while True:
        try:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                steps_of_ours(Path(root), name, size, 2, {**fields, "batch_size": batch}, True)()
            return batch
        except torch.OutOfMemoryError:
            batch //= 2


def torchvision_reference(
    root: Path,
    name: str,
    size: int,
    batch: int,
    workers: int,
    steps: int = STEPS,
    same: bool = False,
) -> Callable[[], None]:
    """`train_one_epoch()` of torchvision's references, `steps` batches at a time.

    With `same` on one batch that is on the device.
    """
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
    batches: Iterator[Any] = itertools.chain.from_iterable(itertools.repeat(loader))
    if same:
        batches = itertools.repeat([part.to(device) for part in next(iter(loader))])
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
