"""How far two computations of one number may be apart, and why at all.

A sum of floats depends on the order of its terms. The order is that of a kernel, and which kernel
computes depends on the instructions of the CPU (AVX2, AVX-512, AMX), on the version of the library,
on the number of threads, and on the shape of the batch. So the same bits are tested only where the
product promises them: for bytes that are copied, for pixels of one decoder, and for a resumed run
that computes in equal shapes on one machine. Everything else is compared by the functions here.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch

COMPUTED = 1e-5
"""Of logits, probabilities and losses, relative above 1. Float32 rounds by 6e-8, the sums of these
networks by up to 2e-6; another image or another graph is off by 1e-2 or more."""
TRAINED_REL, TRAINED_ABS = 5e-3, 2e-3
"""Of weights after some steps. Where the input of a ReLU is rounded to the other side of 0, a
gradient changes at once: by 3e-4 in one step of some fifty, and by 1e-7 in the others."""


def near(expected: Any) -> Any:
    """Return what equals numbers of another forward pass for the same images."""
    return pytest.approx(expected, rel=COMPUTED, abs=COMPUTED)


def converted(
    rows: Iterable[Mapping[str, str]],
    columns: str | tuple[str, ...],
    number: Callable[[float], Any],
) -> list[dict[str, Any]]:
    """Return the rows of a CSV with a function of each number, in columns that begin so."""
    return [
        {
            name: number(float(text)) if text and name.startswith(columns) else text
            for name, text in row.items()
        }
        for row in rows
    ]


def assert_computed_alike(mine: Any, theirs: Any) -> None:
    """Compare tensors or arrays of two forward passes for the same images."""
    both = (torch.as_tensor(values) for values in (mine, theirs))
    torch.testing.assert_close(*both, rtol=COMPUTED, atol=COMPUTED, check_dtype=False)


def assert_trained_alike(
    mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> None:
    """Compare the weights of two trainings on the same batches.

    BatchNorm's counts are left out: they are of the micro-batches of the first rank.
    """
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(
                value, theirs[name], rtol=TRAINED_REL, atol=TRAINED_ABS, msg=name
            )
