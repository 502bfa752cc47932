"""What one GPU does beside the loop: saves, evaluates, decodes JPEG, repeats a recorded step."""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.rounds import measure, ratio, table

ROUNDS, SMALL_BATCH = 10, 16


def decoding(root: str, device: str) -> dict[str, float]:
    """Images a second that the GPU decodes (nvJPEG, by torchcodec), and that in cores."""
    from torchcodec.decoders import decode_jpeg  # type: ignore[attr-defined]

    files = [path.read_bytes() for path in sorted(Path(root, "train").rglob("*.jpg"))[:256]]
    calls: dict[str, Callable[[], object]] = {
        "on the GPU, one call": lambda: _waited(decode_jpeg(files, device=device)),
        "on one core": lambda: [decode_jpeg(file) for file in files],
    }
    seconds = measure(calls, ROUNDS // 2, time.perf_counter)
    table("JPEG of 500x375 to RGB", seconds, len(files), "image")
    best = min(seconds["on the GPU, one call"])
    return {
        "jpeg_gpu_images_per_s": len(files) / best,
        "jpeg_gpu_vs_core": ratio(seconds, "on the GPU, one call", "on one core"),
    }


def stalling(folder: str, name: str, size: int, batch: int, device: str) -> dict[str, float]:
    """Milliseconds that a save of network and momentum adds to two steps after it."""
    import torch

    from kfp_ddp.training.model.networks import build
    from kfp_ddp.training.state.checkpoint import Writer

    network = build(name, 1000).to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, fused=True)
    images = torch.randn(batch, 3, size, size, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    writer, file = Writer(Path(folder) / "checkpoints", keep=1), Path(folder) / "state.pt"

    def steps() -> None:
        for _ in range(2):
            with torch.autocast(device, torch.bfloat16):
                loss = network(images).float().logsumexp(1).mean()
            torch.autograd.backward(loss)
            if writer.copying:
                writer.wait_for_copies()
            optimizer.step()
            optimizer.zero_grad()
        _waited(None)

    def state() -> dict[str, object]:
        return {"model": network.state_dict(), "optimizer": optimizer.state_dict()}

    saves: dict[str, Callable[[int], object]] = {
        "no save": lambda _: None,
        "kfp-ddp": lambda n: writer.save(n, state(), {}, volatile=list(network.buffers())),
        "torch.save": lambda _: torch.save(state(), file),
    }
    steps()
    seconds: dict[str, list[float]] = {save: [] for save in saves}
    for number in range(ROUNDS // 2 + 1):
        for save, call in saves.items():
            began = time.perf_counter()
            call(number)
            steps()
            took = time.perf_counter() - began
            writer.wait()
            if file.exists():  # the next one would wait for a disk that still writes
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            if number:  # the first save makes the buffers
                seconds[save].append(took)
    table(
        f"{name} at {size} px, batch {batch}, two steps with and without a save", seconds, 2, "step"
    )
    none, ours, theirs = (1000 * statistics.median(took) for took in seconds.values())
    return {"checkpoint_stall_ms": ours - none, "torch_save_stall_ms": theirs - none}


def evaluating(root: str, name: str, size: int, batch: int, device: str) -> dict[str, float]:
    """Images a second of an evaluation of JPEG files, in fp32 and in bf16; the network alone."""
    import torch

    from kfp_ddp.evaluation.predict import scored
    from kfp_ddp.pictures.reading import READING
    from kfp_ddp.pictures.splits import scan
    from kfp_ddp.training.data.loader import fixed_batches
    from kfp_ddp.training.distributed import alone, autocast
    from kfp_ddp.training.model.networks import MEAN, STD, build
    from kfp_ddp.training.state.checkpoint import ModelInfo

    torch.backends.cudnn.benchmark = True
    index, world = scan(Path(root, "train")), alone(torch.device(device))
    info = ModelInfo(name, tuple(index.classes), size, MEAN, STD, 0, {})
    network = build(name, len(index.classes)).eval()
    images = torch.randn(batch, 3, size, size, device=device)
    images = images.contiguous(memory_format=torch.channels_last)

    def evaluation(precision: str) -> Callable[[], object]:
        def evaluate() -> int:
            work = ((index, keys) for keys in fixed_batches(index, batch, 0, 1))
            batches = scored(network, info, work, world, READING, precision)
            return sum(len(one.scores) for one in batches)

        return evaluate

    def forward(precision: str) -> Callable[[], object]:
        def compute() -> object:
            with torch.inference_mode(), autocast(world.device, precision):
                return _waited(network(images))

        return compute

    kinds = ("fp32", "bf16")
    seconds = measure({kind: evaluation(kind) for kind in kinds}, 3, time.perf_counter)
    table(f"evaluation of {name} at {size} px from JPEG", seconds, len(index), "image")
    alone_s = measure({kind: forward(kind) for kind in kinds}, ROUNDS, time.perf_counter)
    table("its network alone", alone_s, batch, "image")
    rates = {kind: len(index) / statistics.median(took) for kind, took in seconds.items()}
    figures = {f"evaluation_images_per_s_{kind}": rate for kind, rate in rates.items()}
    return {**figures, "evaluation_bf16_vs_fp32": ratio(alone_s, "bf16", "fp32")}


def recording(name: str, size: int, device: str) -> dict[str, float]:
    """How much faster forward and backward are as CUDA graphs, where a batch is small.

    A CPU has none: there it computes the same twice, to try that it runs.
    """
    import torch

    from kfp_ddp.training.model.networks import build

    torch.backends.cudnn.benchmark = True
    images = torch.randn(SMALL_BATCH, 3, size, size, device=device)
    images = images.contiguous(memory_format=torch.channels_last)

    def call_of(recorded: bool) -> Callable[[], object]:
        network = build(name, 1000).to(device).to(memory_format=torch.channels_last)
        if recorded and device == "cuda":
            with torch.autocast(device, torch.bfloat16, cache_enabled=False):
                torch.cuda.make_graphed_callables(network, (images,))

        def step() -> object:
            with torch.autocast(device, torch.bfloat16, cache_enabled=False):
                loss = network(images).float().logsumexp(1).mean()
            torch.autograd.backward(loss)
            network.zero_grad()
            return _waited(loss)

        return step

    calls = {"recorded": call_of(True), "launched": call_of(False)}
    seconds = measure(calls, ROUNDS, time.perf_counter)
    table(f"{name} at {size} px, batch {SMALL_BATCH}, forward and backward", seconds, 1, "step")
    return {"graph_vs_eager_small_batch": ratio(seconds, "recorded", "launched")}


def _waited(result: object) -> object:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result
