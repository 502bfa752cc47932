"""ResNet-50 at 224 px in bf16 on GPUs, wall time, on generated photographs; needs a GPU.

Eight minutes at most: a part for which no time is left is named and left out, as is one that fails.
It needs this checkout, torch and torchvision with what they need, and `NEEDED`: wheels of 60 MiB.
Loops run one after the other in processes of their own, in one order and then in the other, so
that a GPU that gets warm counts for all. `batch` is 256 or what there is memory for.

- `images_per_s`, `mfu`: our whole step from JPEG files, with a loader process for each core.
- `images_per_s_cached`: the same from the decoded cache.
- `images_per_s_ceiling`: the same steps on a batch that is on the GPU already.
- `real_vs_synthetic`: the better of the first two against it; 1.00 is a loader that is never waited
  for.
- `vs_torchvision`: against the loop of torchvision's references/classification/train.py in its
  published form with --amp, rewritten here: its presets, sampler and workers, NCHW, float16 with
  a scaler, accuracy and meters in each step. `vs_torchvision_synthetic`: both without data.
- `checkpoint_stall_ms`, `torch_save_stall_ms`: what a save adds to the time of the steps after it.
- `evaluation_images_per_s_fp32`, `_bf16`: of a split of JPEG files, as `evaluate` and `predict`
  compute; `evaluation_bf16_vs_fp32`: the network alone, on a batch that is there already.
- `compile_vs_eager`: with `compile` against without, on the batch that is there already.
- `graph_vs_eager_small_batch`: forward and backward of a batch of 16 as CUDA graphs against
  launched one by one: what a loop that records its step could gain where launches are slow.
- `jpeg_gpu_images_per_s`, `jpeg_gpu_vs_core`: JPEG decoded by nvJPEG against one core.
- `decode_gpu_vs_cpu`: the first loop with `decode=gpu` against without.
- `nccl2_efficiency`, `nccl2_hidden`, `nccl2_bus_gb_per_s`: with two GPUs, images a second of two
  ranks against twice those of one; the share of an all-reduce of the gradients, timed alone, that
  the backward pass hides; and the bus bandwidth of that one, 2 (n - 1) / n times its bytes.
"""

import concurrent.futures
import importlib.util
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import loops, ranks, single
from benchmarks.input import photographs
from benchmarks.training import steps_of_ours
from kfp_ddp.core import machine

IMAGES, BATCH = 2048, 256
LIMIT_S, TURN_S = 480.0, 10.0
NEEDED = {
    "torch": "torch",
    "torchvision": "torchvision",
    "numpy": "numpy",
    "PIL": "pillow",
    "pydantic": "pydantic",
    "simplejpeg": "simplejpeg",
    "sklearn": "scikit-learn",
    "torchcodec": "torchcodec",
}
"""Modules, and the packages that have them."""
JPEG, CACHED, SAME, THEIRS = "JPEG", "decoded cache", "the same batch again", "torchvision"
THEIRS_SAME = "torchvision, the same batch again"
DECODED = "JPEG, decoded on the GPU"
COMPILED = "compiled, the same batch again"


def run() -> dict[str, float]:
    """Measure and return the figures by name; none without a GPU or with a package missing."""
    missing = [package for name, package in NEEDED.items() if not importlib.util.find_spec(name)]
    if missing:
        print(f"missing: {', '.join(missing)}; pip install {' '.join(missing)}")
        return {}
    import torch

    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure")
        return {}
    return Measurement("resnet50", 224, TURN_S, time.perf_counter() + LIMIT_S).all(BATCH, IMAGES)


class Measurement:
    """One run of all parts; on a CPU it only tries that they run."""

    def __init__(self, name: str, size: int, turn: float, until: float) -> None:
        self.name, self.size, self.turn, self.until = name, size, turn, until
        self.fields: dict[str, Any] = {"device": "auto", "precision": "bf16", "cache_gb": 0}

    def all(self, batch: int, images: int) -> dict[str, float]:
        """Return the figures of all parts for which time and GPUs suffice."""
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        gpus = torch.cuda.device_count()
        with tempfile.TemporaryDirectory() as folder:
            root = photographs(Path(folder) / "data", images)
            fields = self.fields | {"batch_size": batch}
            fits = in_a_process(loops.fitting, str(root), self.name, self.size, fields)
            self.fields |= {"batch_size": fits}
            figures, rates = {"batch": float(fits)}, self.loops(root)
            figures |= compared(rates) | self.mfu(rates.get(JPEG, 0.0))
            of = (self.name, self.size, fits, device)
            figures |= self.part("save", 40, in_a_process, single.stalling, folder, *of)
            figures |= self.part("evaluation", 50, in_a_process, single.evaluating, str(root), *of)
            jpeg = (single.decoding, str(root), device)
            figures |= self.part("JPEG decoding", 30, in_a_process, *jpeg)
            if device == "cuda" and JPEG in rates:
                figures |= self.part("decode=gpu", 40, self.decoded_there, root, rates[JPEG])
            if gpus < ranks.WORLD:
                print(f"{gpus} GPUs: nccl over two ranks is not measured")
            elif SAME in rates:
                figures |= self.part("two ranks", 120, self.two_ranks, root, rates[SAME])
            small = (single.recording, self.name, self.size, device)
            figures |= self.part("CUDA graphs", 40, in_a_process, *small)
            if SAME in rates:
                figures |= self.part("compile", 120, self.compiled, root, rates[SAME])
        return figures

    def part(
        self, what: str, seconds: float, measure: Callable[..., Mapping[str, float]], *of: Any
    ) -> dict[str, float]:
        """Return the figures of a part; {} if no time is left, or if it fails."""
        if time.perf_counter() + seconds > self.until:
            print(f"{what}: left out, no time is left")
            return {}
        try:
            return dict(measure(*of))
        except Exception as error:  # noqa: BLE001  the other parts are worth having
            print(f"{what}: left out, {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            return {}

    def loops(self, root: Path) -> dict[str, float]:
        """Return images per second of each loop: the mean of both turns."""
        batch, cores = self.fields["batch_size"], max(1, int(machine.cpus()))
        where, loaded = (root, self.name, self.size, loops.STEPS), self.fields | {"workers": cores}
        sides: dict[str, tuple[Any, ...]] = {
            JPEG: (steps_of_ours, *where, loaded),
            CACHED: (steps_of_ours, *where, loaded | {"cache_gb": 64}),
            SAME: (steps_of_ours, *where, self.fields, True),
            THEIRS: (loops.torchvision_reference, root, self.name, self.size, batch, cores),
            THEIRS_SAME: (loops.torchvision_reference, *where[:3], batch, cores, loops.STEPS, True),
        }
        measured: dict[str, list[float]] = {}
        for side in [*sides, *reversed(sides)]:
            for name, rate in self.part(
                side, 3 * self.turn, self.turn_of, side, sides[side]
            ).items():
                measured.setdefault(name, []).append(rate)
        print(f"\n{self.name} at {self.size} px, batch {batch}")
        for side, rates in measured.items():
            print(f"  {side:44} {', '.join(f'{rate:,.0f}' for rate in rates)} images/s")
        return {side: sum(rates) / len(rates) for side, rates in measured.items()}

    def turn_of(self, side: str, made_of: tuple[Any, ...]) -> dict[str, float]:
        """Images a second of one loop."""
        images = self.fields["batch_size"] * loops.STEPS
        return {side: loops.rate(images, self.turn, *made_of)}

    def compiled(self, root: Path, eager: float) -> dict[str, float]:
        """What `compile` gains where no data is waited for."""
        fields = self.fields | {"compile": True}
        made_of = (steps_of_ours, root, self.name, self.size, loops.STEPS, fields, True)
        return {"compile_vs_eager": self.turn_of(COMPILED, made_of)[COMPILED] / eager}

    def decoded_there(self, root: Path, by_loaders: float) -> dict[str, float]:
        """What decoding on the GPU gains in a training from JPEG files."""
        fields = self.fields | {"workers": max(1, int(machine.cpus())), "decode": "gpu"}
        made_of = (steps_of_ours, root, self.name, self.size, loops.STEPS, fields)
        return {"decode_gpu_vs_cpu": self.turn_of(DECODED, made_of)[DECODED] / by_loaders}

    def two_ranks(self, root: Path, one: float) -> dict[str, float]:
        """What a second rank adds."""
        batch = self.fields["batch_size"]
        fields = self.fields | {"batch_size": ranks.WORLD * batch}
        two = ranks.together(str(root), self.name, self.size, fields)
        shown = max(0.0, two["step"] - batch / one)
        n = ranks.WORLD
        return {
            "nccl2_efficiency": batch / two["step"] / one,
            "nccl2_hidden": 1 - min(1.0, shown / two["all_reduce"]),
            "nccl2_bus_gb_per_s": 2 * (n - 1) / n * two["bytes"] / two["all_reduce"] / 1e9,
        }

    def mfu(self, images_per_s: float) -> dict[str, float]:
        """The share of the GPU's peak; none where that is not known."""
        import torch

        from kfp_ddp.training.report.meter import peak_of, training_flops
        from kfp_ddp.training.spec.config import TrainConfig

        peak = peak_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else 0.0
        if not peak or not images_per_s:
            print("mfu: unknown, as the peak of this GPU or our rate is")
            return {}
        of = TrainConfig.create(data="", output_dir="", model=self.name, image_size=self.size)
        return {"mfu": training_flops(of, 2) * images_per_s / (peak * 1e12)}


def compared(rates: Mapping[str, float]) -> dict[str, float]:
    """The figures of the loops that were measured."""
    figures = {}
    if JPEG in rates:
        figures["images_per_s"] = rates[JPEG]
    if CACHED in rates:
        figures["images_per_s_cached"] = rates[CACHED]
    if SAME in rates and figures:
        figures["real_vs_synthetic"] = max(figures.values()) / rates[SAME]
    if SAME in rates:
        figures["images_per_s_ceiling"] = rates[SAME]
    if JPEG in rates and THEIRS in rates:
        figures["vs_torchvision"] = rates[JPEG] / rates[THEIRS]
    if SAME in rates and THEIRS_SAME in rates:
        figures["vs_torchvision_synthetic"] = rates[SAME] / rates[THEIRS_SAME]
    return figures


def in_a_process(work: Callable[..., Any], *of: Any) -> Any:
    """What `work(*of)` returns in a new process, whose memory on the GPU is free afterwards."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *of).result()
