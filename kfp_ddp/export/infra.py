"""Infra validation: run a bundle's model in a clean process with only its runtime."""

import functools
import json
import platform
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfp_ddp.core import machine
from kfp_ddp.export import infra_process
from kfp_ddp.export.formats import INPUT, OUTPUT
from kfp_ddp.models import bundle
from kfp_ddp.models.bundle import ONNX

SECONDS = 300.0
"""Timeout to load a model and answer."""
SECONDS_EACH = 0.2
"""Seconds of timed calls for each batch size."""
_RUNTIME = "onnxruntime"


def validate(
    folder: Path, images: NDArray[np.uint8], expected: NDArray[np.float32], allowed: float
) -> dict[str, Any]:
    """Compute images [N, 3, S, S] with each ONNX file in its own process; return `bundle.INFRA`.

    Only `model.onnx` may differ by at most `allowed`; variants are measured elsewhere.
    """
    results: dict[str, Any] = {}
    reason = ""
    with tempfile.TemporaryDirectory() as aside:
        arrays = {"images": f"{aside}/images.npy", "expected": f"{aside}/expected.npy"}
        np.save(arrays["images"], images)
        np.save(arrays["expected"], expected)
        for path in sorted(folder.glob("*.onnx"), key=lambda one: (one.name != ONNX, one.name)):
            answer, why = _run({**arrays, "model": str(path)})
            if not why and path.name == ONNX:
                why = _too_different(answer["max_abs_difference"], allowed)
            results[path.name] = answer or {"failed": why}
            if why and not reason:
                reason = f"{path.name}: {why}"
    if not results:
        reason = "there is no ONNX file to load"
    return {
        "passed": not reason,
        "reason": reason,
        "samples": len(images),
        "allowed_abs_difference": allowed,
        "machine": f"{platform.machine()}, {machine.cpus():g} CPUs",
        "files": results,
    }


def _too_different(difference: float, allowed: float) -> str:
    """Return why a difference from the checkpoint is not accepted; '' if it is."""
    if difference <= allowed:
        return ""
    return f"differs from the checkpoint by {difference:.3g}, {allowed:.3g} is allowed"


def write_sample(
    folder: Path, image: NDArray[np.uint8], logits: NDArray[np.float32], name: str, allowed: float
) -> None:
    """Write a v2 request with an image, uint8 [3, S, S], and its logits within `allowed`."""
    entry = {"name": INPUT, "datatype": "UINT8", "shape": [1, *image.shape]}
    output = {"name": OUTPUT, "datatype": "FP32", "shape": [1, len(logits)]}
    request = {"id": "sample", "inputs": [{**entry, "data": image.ravel().tolist()}]}
    response = {
        "model_name": name,
        "id": "sample",
        "parameters": {"allowed_abs_difference": allowed},
        "outputs": [{**output, "data": logits.tolist()}],
    }
    (folder / bundle.REQUEST).parent.mkdir(exist_ok=True)
    for file, content in ((bundle.REQUEST, request), (bundle.RESPONSE, response)):
        (folder / file).write_text(json.dumps(content, separators=(",", ":")) + "\n")


def pattern(size: int) -> NDArray[np.uint8]:
    """Return a synthetic image, uint8 [3, size, size]: coloured squares."""
    cell = np.arange(size) * 8 // size
    squares = 37 * cell[:, None] + 91 * cell[None, :] + 53 * np.arange(3)[:, None, None]
    return (squares * squares % 251).astype(np.uint8)


def _run(request: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the answer of the process, and the error in one line or ''."""
    request = {**request, **_runtime(), "seconds_each": SECONDS_EACH}
    command = [sys.executable, "-I", "-S", infra_process.__file__]
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {}, f"has not answered within {SECONDS:.0f} s"
    if done.returncode < 0:
        return {}, f"was ended by signal {-done.returncode} (9 usually means out of memory)"
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1][:250] if lines else "no message"
        return {}, f"fails where only its runtime is installed: {last}"
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer, ""


@functools.cache
def _runtime() -> dict[str, list[str]]:
    """Return the packages of the runtime with its dependencies, and their folders."""
    packages = set[str]()
    folders = set[str]()
    seen = set[str]()
    names = set(metadata.packages_distributions().get(_RUNTIME, [_RUNTIME]))
    while names:
        name = names.pop()
        seen.add(name)
        with suppress(metadata.PackageNotFoundError):  # needed on other platforms only
            package = metadata.distribution(name)
            folders.add(str(package.locate_file("")))  # of the environment, or on PYTHONPATH
            for path in package.files or ():
                packages.add(path.parts[0].removesuffix(".py"))
            names |= _required(package) - seen
    return {"packages": sorted(packages), "folders": sorted(folders)}


def _required(package: metadata.Distribution) -> set[str]:
    """Return the names of the packages that one needs without an extra."""
    every = package.requires or ()
    needs = [need for need in every if "extra ==" not in need]
    return {re.split(r"[^\w.-]", need)[0] for need in needs}
