"""Inputs of an evaluation, as its ranks receive them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.settings import Settings

OUTPUT, REQUEST = "--output-dir", "--request"
SPLIT = "^[A-Za-z0-9][A-Za-z0-9._-]*$"


class Measuring(Settings):
    """Optional measurements."""

    tags: str = ""
    """CSV of tags; accuracy is also reported by their values. A file of the dataset, a path, or
    gs://, s3:// or az://, with a column path and one column for each tag."""
    resamples: int = Field(1000, ge=0, le=100_000)
    """Bootstrap samples for the intervals of macro F1 and calibration error; 0 for no such
    intervals."""


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

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Self:
        """Return the request of a command line by `to_argv`; raise InputError for any other."""
        try:
            fields = json.loads(argv[list(argv).index(REQUEST) + 1])
        except (ValueError, LookupError) as error:
            raise InputError(f"{argv} is not the command line of a rank: {error}") from None
        return cls.create(**fields)


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
