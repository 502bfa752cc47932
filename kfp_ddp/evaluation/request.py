"""What is to be evaluated: the inputs of the step as its ranks take them, wherever they run."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.settings import Settings
from kfp_ddp.evaluation.settings import Measuring

OUTPUT, REQUEST = "--output-dir", "--request"


class Request(Settings):
    """An evaluation; the fields that are inputs of the component are described there."""

    checkpoint: str
    of_run: bool = True
    """Whether the checkpoint is one of the run; else it may be a bundle, too."""
    run_dir: str
    """A folder, or an address."""
    data: str
    """A folder, or what each node brings."""
    split: str = "val"
    batch_size: int = 256
    worst: int = 24
    champion: str = ""
    options: dict[str, Any] = Field(default_factory=dict)
    output_dir: str = ""
    """Folder on the machine of the ranks for their logs; empty for that of the evaluation."""
    device: str = "auto"
    timeout_minutes: float = Field(30.0, gt=0)
    """How long ranks wait for one another: the first writes the report while others wait."""

    def check(self) -> None:
        """Refuse what no evaluation can be of.

        Raises:
            InputError: naming the input.
        """
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

    @property
    def target(self) -> Path:
        """Folder of the evaluation, below a folder `run_dir`."""
        return RunFolder(self.run_dir).evaluation(self.split)

    def to_argv(self) -> list[str]:
        """The command line of the ranks; the folder by which a process is known to be ours too."""
        return [OUTPUT, self.output_dir, REQUEST, json.dumps(self.given(), sort_keys=True)]

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Self:
        """What `to_argv` wrote.

        Raises:
            InputError: it is something else.
        """
        try:
            given = json.loads(argv[list(argv).index(REQUEST) + 1])
        except (ValueError, LookupError) as error:
            raise InputError(f"no evaluation is described by {argv}: {error}") from None
        return cls.create(**given)
