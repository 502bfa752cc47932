"""How long it takes until a dataset lies in a claim, and to see that it has not changed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dataset:
    """So many files and bytes."""

    name: str
    files: float
    size: float


IMAGENET = Dataset("ImageNet-1k", 1.28e6, 138e9)


@dataclass(frozen=True)
class Sync:
    """What our sync computes, in seconds of processor: measured with `benchmarks.sync`'s server.

    The step is one process, so that what it computes it also waits for.
    """

    start: float
    file: float
    """For each file."""
    byte: float
    """For each byte."""
    unchanged: float
    """For each file that is there already."""

    def first(self, data: Dataset, claim: float) -> float:
        """Seconds of a first sync into a claim of `claim` bytes a second."""
        computed = data.files * self.file + data.size * self.byte
        return self.start + max(computed, data.size / claim)

    def again(self, data: Dataset) -> float:
        """Seconds until it is known that nothing has changed."""
        return self.start + data.files * self.unchanged
