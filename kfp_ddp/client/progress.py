"""How far a training is, as the log of its step's pod tells; '' where pods cannot be seen."""

import re
import time

from kfp_ddp.base.errors import InputError
from kfp_ddp.client.connection import Connection, own_namespace
from kfp_ddp.client.steps import Step
from kfp_ddp.components.shared.cluster.api import Api, ApiError, core

LINE = re.compile(r"step \d+(/\d+)? · .*")
LOOKED_BACK = "40"
LOOK_SECONDS = 5.0
OFF_SECONDS = 60.0
"""How long the cluster is left alone after it refused."""


def api_of(connection: Connection) -> Api:
    """The cluster's API in the namespace of the runs.

    Raises:
        InputError: no cluster is configured.
    """
    wanted = connection.namespace or own_namespace(connection.context)
    return Api.connect(wanted or connection.kfp_namespace, connection.context)


class Progress:
    """Looks into the logs of a run's pods, through the Kubernetes API."""

    def __init__(self, connection: Connection, run_id: str) -> None:
        self._run_id = run_id
        self._connection = connection
        self._api: Api | None = None
        self._not_before = 0.0
        self._told: dict[str, tuple[float, str]] = {}

    def __call__(self, step: Step) -> str:
        """The newest line of progress of a step; '' for none."""
        at, line = self._told.get(step.pods[-1] if step.pods else "", (0.0, ""))
        now = time.monotonic()
        if not step.pods or now - at < LOOK_SECONDS or now < self._not_before:
            return line
        try:
            line = self._line(step.pods[-1]) or line
        except (ApiError, InputError):
            self._not_before = now + OFF_SECONDS
        self._told[step.pods[-1]] = (now, line)
        return line

    def _line(self, node: str) -> str:
        self._api = self._api or api_of(self._connection)
        pods = core(self._api.namespace, "pods")
        found = self._api.call(
            "GET", pods, query={"labelSelector": f"pipeline/runid={self._run_id}"}
        )
        number = node.rpartition("-")[2]
        for pod in found.get("items", []):
            name = pod["metadata"]["name"]
            if name.endswith(f"-{number}"):
                query = {"container": "main", "tailLines": LOOKED_BACK}
                log = self._api.call("GET", f"{pods}/{name}/log", query=query, raw=True)["value"]
                lines = [match[0] for each in log.splitlines() if (match := LINE.search(each))]
                return lines[-1].strip() if lines else ""
        return ""
