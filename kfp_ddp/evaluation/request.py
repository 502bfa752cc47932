"""Inputs of an evaluation, as its ranks receive them."""

import json
from collections.abc import Mapping, Sequence
from os.path import splitext
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.settings import Settings, split
from kfp_ddp.core.step import KEY_NAME, KEY_NAME_MEANING
from kfp_ddp.models.release import ChampionKey
from kfp_ddp.storage.address import check_address

OUTPUT = "--output-dir"
REQUEST = "--request"
CSV = ".csv"
PARQUET = ".parquet"
SPLIT = "^[A-Za-z0-9][A-Za-z0-9._-]*$"


def _as_list(names: object) -> object:
    """Return a single name as a list of it."""
    return [names] if isinstance(names, str) else names


class Measuring(Settings):
    """Optional measurements, and the key of the champion, which the gate has, too."""

    patterns: ClassVar = {KEY_NAME: KEY_NAME_MEANING}
    set_by_step: ClassVar = frozenset(("network",))

    tags: str = ""
    """CSV of tags; accuracy is also reported by their values. A file of the dataset, a path, or
    gs://, s3:// or az://, with a column path and one column for each tag."""
    resamples: int = Field(1000, ge=0, le=100_000)
    """Bootstrap samples for the intervals of macro F1 and calibration error; 0 for no such
    intervals."""
    champion_key: ChampionKey = ""
    classes: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ()
    """Names of the classes of a network of your own, in the order of its logits; empty for those
    that its weights name, or the dataset's, sorted. A command line takes a file: a name a line, or
    a list in JSON."""
    network: dict[str, Any] = Field(default_factory=dict)
    """Settings of the training with model, where the checkpoint is weights of that network alone;
    empty for a checkpoint or a bundle, which has them."""

    @model_validator(mode="after")
    def _distinct_classes(self) -> Self:
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("classes names one of them twice: correct the list")
        if len(self.classes) == 1:
            raise ValueError(
                f"classes={self.classes[0]!r} is neither a file on this machine nor a list of two "
                "names or more: correct it"
            )
        return self


class RankRequest(Settings):
    """What ranks receive on their command line."""

    output_dir: str = ""
    """Local folder for the logs of the ranks; empty for that of the results."""
    device: str = "auto"
    timeout_minutes: float = Field(30.0, gt=0)
    """Timeout of collectives: other ranks wait while the first one writes the report."""

    def changed(self, **fields: str) -> Self:
        """Return the request with other values of these fields."""
        return self.create(**{**self.explicit(), **fields})

    def to_argv(self) -> list[str]:
        """Return the command line of the ranks; the folder identifies their processes."""
        return [OUTPUT, self.output_dir, REQUEST, json.dumps(self.explicit(), sort_keys=True)]


class EvaluationRequest(RankRequest):
    """An evaluation; the inputs of the component are documented there."""

    patterns: ClassVar = {SPLIT: "the name of a folder of the dataset, such as val"}

    checkpoint: str
    of_run: bool = True
    """Whether the checkpoint is of the run; otherwise it may be a bundle."""
    run_dir: str
    """Folder or URI."""
    data: str
    """Dataset path, or a dataset that each node downloads."""
    split: str = Field("val", pattern=SPLIT)
    """Images to evaluate on."""
    batch_size: int = Field(256, ge=1)
    """Images at a time."""
    worst: int = Field(24, ge=0, le=200)
    """Mistakes in the report."""
    champion: str = ""
    options: Measuring = Measuring()

    @property
    def target(self) -> Path:
        """Folder of the evaluation below a local `run_dir`."""
        return RunFolder(self.run_dir).evaluation(self.split)


class PredictionRequest(RankRequest):
    """A batch prediction; the inputs of the component are documented there."""

    patterns: ClassVar = {KEY_NAME: KEY_NAME_MEANING}

    set_by_step: ClassVar = frozenset(
        ("source", "bundle", "table", "output_dir", "device", "timeout_minutes")
    )

    source: str
    bundle: str
    table: str
    batch_size: int = Field(256, ge=1)
    """Images at a time."""
    shard_images: int = Field(1024, ge=1, le=65_536)
    """Most objects of a shard, which a killed run computes again; also at most 512 MiB, unless one
    object has more. A rank has the files of three shards on its disk."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format; auto: bf16 on a GPU that supports it, otherwise fp32, as evaluations have."""
    allow_code: bool = False
    """Whether to run the network's own code, which a bundle may have."""
    bundle_key: str = Field("", pattern=KEY_NAME)
    """Key of the bucket's secret with a public key in PEM, which must verify the bundle's
    signature; empty for no verification."""
    requester_pays: str = ""
    """For a source whose requester pays: the project that pays for gs://, or requester for s3://,
    where the account of the credentials pays."""
    timeout_minutes: float = Field(7 * 24 * 60.0, gt=0)
    """Ranks wait for those with more to do."""

    @model_validator(mode="after")
    def _valid_addresses(self) -> Self:
        for name in ("source", "bundle", "table"):
            check_address(name, getattr(self, name))
        suffix_of(self.table)
        return self

    @classmethod
    def from_inputs(cls, source: str, bundle: str, table: str, options: Mapping[str, Any]) -> Self:
        """Return the request of a step's inputs; raise InputError."""
        (fields,) = split("prediction", options, cls)
        return cls.create(source=source, bundle=bundle, table=table, **fields)


def suffix_of(table: str) -> str:
    """Return the suffix that names the format of a table; raise InputError for another."""
    suffix = splitext(table)[1]
    if suffix not in (CSV, PARQUET):
        raise InputError(f"table={table!r} ends in neither {CSV} nor {PARQUET}: name one of these")
    return suffix


def parse(argv: Sequence[str]) -> EvaluationRequest | PredictionRequest:
    """Return the request of a command line by `to_argv`; raise InputError for any other."""
    try:
        fields = json.loads(argv[list(argv).index(REQUEST) + 1])
    except (ValueError, LookupError) as error:
        raise InputError(f"{argv} is not the command line of a rank: {error}") from None
    return (PredictionRequest if "table" in fields else EvaluationRequest).create(**fields)
