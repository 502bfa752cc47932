"""The logs of a run's nodes from KFP itself, which also has those of deleted pods."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kfp_ddp.client.steps import OVER, Leaf
from kfp_ddp.core.errors import ServerError, StorageError
from kfp_ddp.core.settings import mapping_in
from kfp_ddp.core.text import one_line
from kfp_ddp.k8s.api import split_lines

if TYPE_CHECKING:
    from kfp_ddp.client.compat import Client

LOG = "/apis/v1alpha1/runs/{run_id}/nodes/{node_id}/log"
NO_LOG = "Failed to read logs"
"""In KFP's error for a node without a log."""
LONGEST = 1 << 20


class KfpLogs:
    """The logs of one run."""

    def __init__(self, client: "Client", run_id: str) -> None:
        self._client, self._run_id = client, run_id

    def lines(self, leaf: Leaf) -> Iterator[str]:
        """Yield a step's log, of all its iterations; raise StorageError if it is over without."""
        for nodes in leaf.step.nodes or ((),):
            try:
                yield from self.log(nodes)
            except StorageError as error:
                if leaf.step.state in OVER:
                    raise StorageError(f"KFP has no log of {leaf.label}: {error}") from None

    def log(self, nodes: Sequence[str], follow: bool = False) -> Iterator[str]:
        """Yield the log of the last of these nodes that has one; StorageError if none has."""
        problem = "it lists no pod of it"
        for node in reversed(nodes):
            lines = self._lines(node, follow)
            try:
                first = next(lines, None)
            except (StorageError, ServerError) as error:
                if isinstance(error, ServerError) and NO_LOG not in str(error):
                    raise
                problem = str(error)
                continue
            if first is not None:
                yield first
                yield from lines
            return
        raise StorageError(problem)

    def _lines(self, node: str, follow: bool) -> Iterator[str]:
        query = {"follow": "true"} if follow else {}
        blocks = self._client.blocks(LOG, query, run_id=self._run_id, node_id=node)
        for line in split_lines(blocks, LONGEST):
            # KFP 2.17 answers 200 also where there is no log, or where it breaks off.
            if line.startswith(b'{"error_message"') and not line.endswith(b"\n"):
                message = str(mapping_in(line).get("error_message"))
                raise StorageError(one_line(message.rpartition("due to ")[2]))
            yield line.decode("utf-8", "replace").rstrip("\n")
