"""Inputs of an evaluation, as its ranks receive them."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.settings import Settings

OUTPUT, REQUEST = "--output-dir", "--request"


class Measuring(Settings):
    """Optional measurements."""

    tags: str = ""
    """CSV of tags; accuracy is also reported by their values. A file of the dataset, a path, or
    gs://, s3:// or az://, with a column path and one column for each tag."""
    resamples: int = Field(1000, ge=0, le=100_000)
    """Bootstrap samples for the intervals of macro F1 and calibration error; 0 for no such
    intervals."""


class Request(Settings):
    """An evaluation; the inputs of the component are documented there."""

    checkpoint: str
    of_run: bool = True
    """Whether the checkpoint is of the run; otherwise it may be a bundle."""
    run_dir: str
    """Folder or URI."""
    data: str
    """Dataset path, or a dataset that each node downloads."""
    split: str = "val"
    batch_size: int = 256
    worst: int = 24
    champion: str = ""
    options: dict[str, Any] = Field(default_factory=dict)
    output_dir: str = ""
    """Local folder for the logs of the ranks; empty for the folder of the evaluation."""
    device: str = "auto"
    timeout_minutes: float = Field(30.0, gt=0)
    """Timeout of collectives: other ranks wait while the first one writes the report."""

    def check(self) -> None:
        """Reject invalid inputs."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.split):
            raise InputError(
                f"split is {self.split!r}: it names a folder of the dataset, such as val"
            )
        if self.batch_size < 1:
            raise InputError(
                f"batch_size is {self.batch_size}: images at a time must be at least 1"
            )
        if not 0 <= self.worst <= 200:
            raise InputError(f"worst is {self.worst}: the report shows 0 to 200 mistakes")
        Measuring.create(**self.options)

    def changed(self, **fields: str) -> Self:
        """Return the request with other values of these fields."""
        return self.create(**{**self.given(), **fields})

    @property
    def target(self) -> Path:
        """Folder of the evaluation below a local `run_dir`."""
        return RunFolder(self.run_dir).evaluation(self.split)

    def to_argv(self) -> list[str]:
        """Return the command line of the ranks; the folder identifies their processes."""
        return [OUTPUT, self.output_dir, REQUEST, json.dumps(self.given(), sort_keys=True)]

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Self:
        """Return the request of a command line by `to_argv`; raise InputError for any other."""
        try:
            fields = json.loads(argv[list(argv).index(REQUEST) + 1])
        except (ValueError, LookupError) as error:
            raise InputError(f"{argv} does not describe an evaluation: {error}") from None
        return cls.create(**fields)
