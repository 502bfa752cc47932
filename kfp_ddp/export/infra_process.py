"""Run a model in ONNX Runtime, without this package; JSON from stdin to stdout, see `infra`."""

import json
import platform
import statistics
import sys
import time
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

BATCHES = (1, 8)


class Only:
    """Import finder for some packages in some folders; with `-I -S` no others are found."""

    def __init__(self, packages: list[str], folders: list[str]) -> None:
        self.packages = packages
        self.folders = folders

    def find_spec(self, name: str, path: Any = None, _: Any = None) -> ModuleSpec | None:
        """Return the spec of a module; the protocol of `sys.meta_path`."""
        if path is None and name in self.packages:
            return PathFinder.find_spec(name, self.folders)
        return None


def main() -> None:
    """Load the model, compute the samples, and report time and memory."""
    request = json.load(sys.stdin)
    sys.meta_path.append(Only(request["packages"], request["folders"]))
    import numpy
    import onnxruntime

    images = numpy.load(request["images"])
    expected = numpy.load(request["expected"])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    start = time.perf_counter()
    session = onnxruntime.InferenceSession(
        Path(request["model"]), options, providers=["CPUExecutionProvider"]
    )
    load_ms = (time.perf_counter() - start) * 1e3
    entry = session.get_inputs()[0].name
    output = session.get_outputs()[0].name

    def answer(batch: Any) -> Any:
        return session.run([output], {entry: batch})[0]

    # The first alone, then all in one batch, as a server forms batches of any size.
    logits = numpy.concatenate([answer(images[:1]), answer(images)])
    reference = numpy.concatenate([expected[:1], expected])
    if logits.shape != reference.shape:
        raise ValueError(f"logits of shape {list(logits.shape)}, not {list(reference.shape)}")
    difference = numpy.abs(logits - reference)
    latency = {}
    for size in BATCHES:
        batch = numpy.resize(images, (size, *images.shape[1:]))
        taken = times(answer, batch, request["seconds_each"], least=5)
        latency[f"batch_{size}"] = {
            "median_ms": round(statistics.median(taken), 4),
            "p95_ms": round(taken[int(len(taken) * 0.95)], 4),
            "calls": len(taken),
        }
    json.dump(
        {
            "runtime": f"onnxruntime {onnxruntime.__version__}",
            "python": platform.python_version(),
            "load_ms": round(load_ms, 3),
            "memory_mb": round(peak_bytes() / 1e6, 3),
            "latency": latency,
            # JSON has no NaN; a number above any bound means the same.
            "max_abs_difference": float(numpy.nan_to_num(difference, nan=1e38).max()),
            "same_top1": float((logits.argmax(1) == reference.argmax(1)).mean()),
        },
        sys.stdout,
    )


def times(answer: Any, batch: Any, seconds: float, least: int) -> list[float]:
    """Return the sorted milliseconds of calls: of some seconds, and of at least `least`."""
    taken: list[float] = []
    answer(batch)
    while len(taken) < least or sum(taken) < seconds * 1e3:
        start = time.perf_counter()
        answer(batch)
        taken.append((time.perf_counter() - start) * 1e3)
    return sorted(taken)


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    except OSError:  # macOS; on Linux this would include the parent
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
