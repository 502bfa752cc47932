"""What all steps of one sync share."""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

from kfp_ddp.datasets.meter import Meter
from kfp_ddp.datasets.options import Options
from kfp_ddp.storage.retry import Retry
from kfp_ddp.storage.sources import Source

if TYPE_CHECKING:
    from kfp_ddp.training.layout import Rule

Watch = Callable[[str, Meter | None, int, int], None]
"""Called as (phase, meter, files, bytes) when a phase starts."""


class Context(NamedTuple):
    """Where the data comes from, what a person chose, and who is told how far it is."""

    source: Source
    options: Options
    retry: Retry
    watch: Watch
    run_id: str = ""
    """Id of the pipeline run that gets the version; '' for none."""
    rule: "Rule | None" = None
    """How its images are laid out; None where nothing is asked of it."""
    only: Collection[str] = ()
    """The names to take, where what the source gained since is to be left out; none for all."""

    def phase(self, name: str) -> None:
        """Tell that a phase starts that counts nothing."""
        self.watch(name, None, 0, 0)
