"""What one GPU can do beside the loop: decode JPEG, and repeat a step that was recorded."""

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
