"""What a rank trains and is measured on."""

from dataclasses import dataclass

from kfp_ddp.training.cache import Cache
from kfp_ddp.training.data import Index


@dataclass(frozen=True)
class Split:
    """One half of the data, with its decoded images where they are cached."""

    index: Index
    cache: Cache | None
    digest: str = ""
    """Of the paths and sizes of the images."""
