"""A model in ONNX Runtime and nothing else: run as a program, which imports nothing of ours.

It takes one JSON object on standard input and answers with one, see `infra.py`.
"""

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
    """Finds some packages in some folders; with `-I -S` nothing else finds any there."""

    def __init__(self, packages: list[str], folders: list[str]) -> None:
        self.packages = packages
        self.folders = folders

    def find_spec(self, name: str, path: Any = None, _: Any = None) -> ModuleSpec | None:
        """As the import system asks a finder on `sys.meta_path`."""
        if path is None and name in self.packages:
            return PathFinder.find_spec(name, self.folders)
        return None


def main() -> None:
    """Load the model, answer the samples, and tell what that took."""
    asked = json.load(sys.stdin)
    sys.meta_path.append(Only(asked["packages"], asked["folders"]))
    import numpy
    import onnxruntime

    images, expected = numpy.load(asked["images"]), numpy.load(asked["expected"])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    start = time.perf_counter()
    session = onnxruntime.InferenceSession(
        Path(asked["model"]), options, providers=["CPUExecutionProvider"]
    )
    load_ms = (time.perf_counter() - start) * 1e3
    entry, output = session.get_inputs()[0].name, session.get_outputs()[0].name

    def answer(batch: Any) -> Any:
        return session.run([output], {entry: batch})[0]

    # The first alone, then all in one batch: a server puts them together as they come.
    found = numpy.concatenate([answer(images[:1]), answer(images)])
    wanted = numpy.concatenate([expected[:1], expected])
    if found.shape != wanted.shape:
        raise ValueError(f"logits of shape {list(found.shape)}, not {list(wanted.shape)}")
    difference = numpy.abs(found - wanted)
    latency = {
        f"batch_{size}": timed(
            answer, numpy.resize(images, (size, *images.shape[1:])), asked["seconds_each"]
        )
        for size in BATCHES
    }
    json.dump(
        {
            "runtime": f"onnxruntime {onnxruntime.__version__}",
            "python": platform.python_version(),
            "load_ms": round(load_ms, 3),
            "memory_mb": round(peak_bytes() / 1e6, 3),
            "latency": latency,
            # NaN is no JSON: a number that nothing may differ by says it as well.
            "max_abs_difference": float(numpy.nan_to_num(difference, nan=1e38).max()),
            "same_top1": float((found.argmax(1) == wanted.argmax(1)).mean()),
        },
        sys.stdout,
    )


def timed(answer: Any, batch: Any, seconds: float) -> dict[str, Any]:
    """Milliseconds a call, for so many seconds and at least five calls."""
    times: list[float] = []
    answer(batch)
    while len(times) < 5 or sum(times) < seconds * 1e3:
        start = time.perf_counter()
        answer(batch)
        times.append((time.perf_counter() - start) * 1e3)
    return {
        "median_ms": round(statistics.median(times), 4),
        "p95_ms": round(sorted(times)[int(len(times) * 0.95)], 4),
        "calls": len(times),
    }


def peak_bytes() -> int:
    """The most memory that this process held at once."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    except OSError:  # macOS; on Linux this would count what forked it
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
