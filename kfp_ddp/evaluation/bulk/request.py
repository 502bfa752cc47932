"""Inputs of a batch prediction, as its ranks receive them."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from kfp_ddp.core.settings import Settings
from kfp_ddp.evaluation.bulk.table import suffix_of
from kfp_ddp.evaluation.request import RankRequest
from kfp_ddp.storage.kinds import check_address


class Prediction(Settings):
    """Settings of a batch prediction."""

    batch_size: int = Field(256, ge=1)
    """Images at a time."""
    shard_images: int = Field(1024, ge=1, le=65_536)
    """Objects of a shard at most, which a killed run computes again; also at most 512 MiB, unless
    one object has more. A rank has the files of three shards on its disk."""
    include: tuple[str, ...] = ()
    """Globs of the objects to predict, such as 2026/**; empty for all."""
    exclude: tuple[str, ...] = ()
    """Globs of objects to leave out."""
    symlinks: Literal["error", "skip", "follow"] = "error"
    """What to do with symbolic links in a source folder."""
    allow_code: bool = False
    """Whether to run the network's own code, which a bundle may have."""


class PredictionRequest(RankRequest):
    """A batch prediction; the inputs of the component are documented there."""

    set_by_step: ClassVar = frozenset({"output_dir", "device", "timeout_minutes"})

    source: str
    """Objects to predict."""
    bundle: str
    """Model that predicts."""
    table: str
    """URI of the table."""
    options: Prediction = Prediction()
    timeout_minutes: float = Field(7 * 24 * 60.0, gt=0)
    """Timeout of collectives: ranks wait for those with more to do."""

    @model_validator(mode="after")
    def _addresses(self) -> Self:
        for name in ("source", "bundle", "table"):
            check_address(name, getattr(self, name))
        suffix_of(self.table)
        return self


def create(source: str, bundle: str, table: str, options: Mapping[str, Any]) -> PredictionRequest:
    """Return the request of a step's inputs; raise InputError."""
    checked = Prediction.create(**options)
    return PredictionRequest.create(source=source, bundle=bundle, table=table, options=checked)
