"""How long a job takes from a failure, or from nothing, to its next step."""

from dataclasses import dataclass

REQUESTS_PER_S = 20.0
"""Of the operator to the API server: controller-runtime's default, with bursts of 30
(kubeflow/trainer pull request 2411)."""
REQUESTS_PER_POD = 2
"""The operator makes a pod and a Service for each node."""


@dataclass(frozen=True)
class Start:
    """What a start is made of; seconds, measured where `benchmarks scale` runs or stated.

    Each rank opens a connection to each other for what is agreed on the CPU (gloo).
    """

    imports: float
    """Python, torch and the training loop."""
    meeting: float
    """Of the ranks, for each other rank."""
    checkpoint: float
    """Bytes of one."""
    read: float
    """Bytes a second at which a rank verifies and takes over a checkpoint."""
    claim: float = 1e9
    """Bytes a second of the claim from which all nodes read it."""
    decision: float = 2.0
    """Until the launcher has acted on a failure: the bound of tests/e2e/test_launch_many.py."""
    pod: float = 10.0
    """From a pod's creation to its first line, its image being there already: stated."""

    def seconds(self, nodes: int, per_node: int) -> float:
        """From the failure to the first step of a job of `nodes`."""
        created = max(0.0, nodes * REQUESTS_PER_POD - 30) / REQUESTS_PER_S
        met = self.meeting * (nodes * per_node - 1)
        restored = max(self.checkpoint / self.read, nodes * self.checkpoint / self.claim)
        return self.decision + created + self.pod + self.imports + met + restored
