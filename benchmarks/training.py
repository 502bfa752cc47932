"""The training loop against its peers, one thread a rank, CPU time, on generated photographs.

Peers have processes of their own, as each sets up its allocator in its own way, or not at all.

- `step_overhead`: our whole step (agreement to stop, schedule, metrics, NaN watch, data wait)
  over a hand-written DDP step on the same batch, two gloo ranks, ResNet-18 at 64 px: a share,
  1.00 is no overhead; less, as our convolutions of small maps are matrix products. The only figure
  here where less is better.
- `step_overhead_same_convolutions`: the same with torch's own convolutions in our step.
- `rn18_64_vs_reference`, `rn50_224_vs_reference`: images a second, data included, against the
  loop of pytorch/examples' imagenet/main.py in its published form on a CPU (float32, ImageFolder,
  v1 transforms, loss.item() and accuracy each step); ours channels last, in bf16 where the CPU
  computes in it, from JPEG (`rn18_64_vs_reference_jpeg`) and as it is by default for a set this
  small, from the cache.
- `checkpoint_stall_vs_torch_save`: how much less a save of ResNet-50 with SGD momentum stops the
  loop than torch.save of the same state to the same disk, wall time: what `save` takes and what the
  next update waits, after a forward and backward pass of four images, for the copy that another
  thread makes meanwhile on another core. The disk has nothing left to write when either begins:
  torch.save over a file that is still being written waits for that.
- `real_vs_synthetic`: images a second from JPEG files with one loader process, against the same
  steps on a batch in memory, ResNet-18 at 64 px, wall time; 1.00 is a loader that is never waited
  for. Needs a core for each of the two.
"""

import contextlib
import itertools
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.input import photographs
from benchmarks.rounds import add_to_meters, apart, measure, ratio, table, take_turns

ROUNDS = 5


def run() -> dict[str, float]:
    """Measure and return the figures by name."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = photographs(Path(folder) / "data", 128)
        figures = _step_overhead(root)
        figures |= _against_reference(root, "resnet18", 64, batch=32, steps=4)
        figures |= _against_reference(root, "resnet50", 224, batch=32, steps=1)
        figures["checkpoint_stall_vs_torch_save"] = _checkpoint_stall(Path(folder))
        figures["real_vs_synthetic"] = _real_vs_synthetic(root)
    return figures


def trainer_on(root: Path, name: str, size: int, **fields: Any) -> Any:
    """A trainer on `root`, alone or in the process group of this process, and its cache."""
    from kfp_ddp.pictures.splits import scan
    from kfp_ddp.training import distributed
    from kfp_ddp.training.data.cache import Cache
    from kfp_ddp.training.data.loader import Split
    from kfp_ddp.training.spec.config import TrainConfig
    from kfp_ddp.training.trainer import Trainer

    settings: dict[str, Any] = {"data": str(root), "model": name, "image_size": size, "workers": 0}
    output = tempfile.mkdtemp(dir=root.parent)
    settings |= {"epochs": 100_000, "output_dir": output, "device": "cpu", "learning_rate": 1e-3}
    config = TrainConfig.create(**{**settings, "checkpoint_epochs": 0, **fields})
    world = distributed.start(config)
    micro = config.batch_size // world.size
    config = config.model_copy(update={"micro_batch_size": micro, "eval_epochs": 90_000})
    index = scan(root / "train")
    cache = None
    if config.cache_gb:
        cache = Cache(Path(output) / "cache", "train", len(index), parts=1)
        cache.build(index.where, config, True, 0)
    return Trainer(config, world, Split(index, cache), Split(index, None))


def _step_overhead(root: Path) -> dict[str, float]:
    """Each rank's CPU time; the ranks do ours and the bare loop in turns."""
    from torch import multiprocessing

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=_overhead_rank, args=(i, str(root), port, results)) for i in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    _, seconds = min(results.get() for _ in ranks)
    for rank in ranks:
        rank.join()
    table("step, ResNet-18 at 64 px, batch 2 x 16, 2 gloo ranks", seconds, 1, "step")
    return {
        "step_overhead": 1 / ratio(seconds, "kfp-ddp", "bare DDP loop"),
        "step_overhead_same_convolutions": 1 / ratio(seconds, "kfp-ddp, torch's", "bare DDP loop"),
    }


def _overhead_rank(rank: int, root: str, port: int, results: Any) -> None:
    import torch
    import torch.nn.functional as F  # noqa: N812
    from torch.nn.parallel import DistributedDataParallel

    from kfp_ddp.training.model import convolutions

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    trainer = trainer_on(Path(root), "resnet18", 64, batch_size=32, cache_gb=0.1)
    batch = next(trainer.batches())
    forever = itertools.repeat(batch)
    model = _fresh(trainer)
    ddp = DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=True, forward_sync_buffers=False
    )
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-3, momentum=0.9, nesterov=True, fused=True
    )

    def bare() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(batch.images), batch.targets, label_smoothing=0.1)
        torch.autograd.backward(loss)
        optimizer.step()

    def ours_with(forward: Any) -> None:
        with mock.patch.object(convolutions.Conv2d, "_conv_forward", forward):
            trainer.advance(forever)

    calls: dict[str, Callable[[], object]] = {
        "kfp-ddp": lambda: trainer.advance(forever),
        "kfp-ddp, torch's": lambda: ours_with(torch.nn.Conv2d._conv_forward),
        "bare DDP loop": bare,
    }
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        results.put((rank, measure(calls, rounds=24)))
    trainer.world.barrier()
    torch.distributed.destroy_process_group()


def _fresh(trainer: Any) -> Any:
    import torch

    from kfp_ddp.training.model import networks

    network = networks.build(trainer.config.model, len(trainer.split.index.classes))
    return network.to(memory_format=torch.channels_last)


def _against_reference(
    root: Path, name: str, size: int, batch: int, steps: int
) -> dict[str, float]:
    key = f"rn{name.removeprefix('resnet')}_{size}_vs_reference"
    fields = {"batch_size": batch, "precision": precision()}
    with (
        apart(steps_of_ours, root, name, size, steps, fields) as cached,
        apart(steps_of_ours, root, name, size, steps, {**fields, "cache_gb": 0}) as jpeg,
        apart(_reference, root, name, size, steps, batch) as reference,
    ):
        calls = {
            "kfp-ddp, decoded cache": cached,
            "kfp-ddp, JPEG": jpeg,
            "pytorch/examples imagenet": reference,
        }
        seconds = take_turns(calls, ROUNDS if size < 128 else 3)
    table(f"{name} at {size} px, batch {batch}, data included", seconds, batch * steps, "image")
    return {
        key: ratio(seconds, "kfp-ddp, decoded cache", "pytorch/examples imagenet"),
        f"{key}_jpeg": ratio(seconds, "kfp-ddp, JPEG", "pytorch/examples imagenet"),
    }


def precision() -> str:
    """Return bf16 where this CPU computes in it: elsewhere it is emulated, ten times slower."""
    import torch

    return "bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32"


def steps_of_ours(
    root: Path, name: str, size: int, steps: int, fields: dict[str, Any], same: bool = False
) -> Callable[[], None]:
    """`steps` of our loop at a time; with `same` on one batch that is on the device."""
    import torch

    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    trainer = trainer_on(root, name, size, **fields)
    batches: Iterator[Any] = trainer.batches()
    if same:
        batches = itertools.repeat(next(batches))

    def some() -> None:
        for _ in range(steps):
            trainer.advance(batches)
        if trainer.world.device.type == "cuda":
            torch.cuda.synchronize()

    return some


def _reference(root: Path, name: str, size: int, steps: int, batch: int) -> Callable[[], None]:
    """`train()` of pytorch/examples' imagenet/main.py, its meters included, `steps` at a time."""
    import torch
    from torch.utils.data import DataLoader
    from torchvision import datasets, models, transforms

    torch.set_num_threads(1)
    network = models.get_model(name, weights=None)
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(network.parameters(), 0.001, momentum=0.9, weight_decay=1e-4)
    normalize = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    dataset = datasets.ImageFolder(
        str(root / "train"),
        transforms.Compose(
            [
                transforms.RandomResizedCrop(size),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                normalize,
            ]
        ),
    )
    loader = DataLoader(dataset, batch_size=batch, shuffle=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    network.train()
    seen = [0.0, 0.0, 0.0]

    def some() -> None:
        for images, target in itertools.islice(batches, steps):
            output = network(images)
            loss = criterion(output, target)
            with torch.no_grad():
                add_to_meters(seen, loss, output, target)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()

    return some


def _checkpoint_stall(folder: Path) -> float:
    import torch

    from kfp_ddp.training.model.networks import build
    from kfp_ddp.training.state.checkpoint import Writer

    network = build("resnet50", 1000)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, fused=True)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
    writer = Writer(folder / "checkpoints", keep=2)
    images = torch.randn(4, 3, 224, 224)
    seconds: dict[str, list[float]] = {"kfp-ddp": [], "torch.save": []}
    for number in range(2 * ROUNDS + 1):
        began = time.perf_counter()
        writer.save(number, state, {}, volatile=list(network.buffers()))
        ours = time.perf_counter() - began
        torch.autograd.backward(network(images).sum())
        began = time.perf_counter()
        writer.wait_for_copies()
        ours += time.perf_counter() - began
        writer.wait()
        began = time.perf_counter()
        torch.save(state, folder / "state.pt")
        theirs = time.perf_counter() - began
        with open(folder / "state.pt", "rb") as written:
            os.fsync(written.fileno())
        if number:  # the first save makes the buffers
            seconds["kfp-ddp"].append(ours)
            seconds["torch.save"].append(theirs)
    table("a save of ResNet-50 with momentum, 205 MB: how long the loop waits", seconds, 1, "save")
    return ratio(seconds, "kfp-ddp", "torch.save")


def _real_vs_synthetic(root: Path) -> float:
    fields = {"batch_size": 32, "precision": precision()}
    jpeg = {**fields, "workers": 1, "cache_gb": 0}
    wall = time.perf_counter
    with (
        apart(steps_of_ours, root, "resnet18", 64, 4, jpeg, clock=wall) as real,
        apart(steps_of_ours, root, "resnet18", 64, 4, fields, True, clock=wall) as synthetic,
    ):
        calls = {"from JPEG, one loader process": real, "the same batch again": synthetic}
        seconds = take_turns(calls, 2 * ROUNDS)
    table("ResNet-18 at 64 px, batch 32, wall time", seconds, 128, "image")
    return ratio(seconds, "from JPEG, one loader process", "the same batch again")
