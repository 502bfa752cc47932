"""How far a training is, as the log of its step's pod tells, or why that pod waits."""

import re
import time

from kfp_ddp.client import pods
from kfp_ddp.client.connection import own_namespace
from kfp_ddp.client.steps import Step
from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.jobs.live_runs import KFP_RUN
from kfp_ddp.k8s.api import Api, ApiError, core

LINE = re.compile(r"step \d+(/\d+)? · .*")
LOOKED_BACK = 40
LOOK_SECONDS = 5.0
OFF_SECONDS = 300.0
"""How long the cluster is left alone after it refused."""


def api_of(connection: Connection) -> Api:
    """The cluster's API in the namespace of the runs.

    Raises:
        InputError: no cluster is configured.
    """
    wanted = connection.namespace or own_namespace(connection.context)
    try:
        return Api.connect(wanted or connection.kfp_namespace, connection.context)
    except InputError:
        raise InputError(
            "no cluster is configured to look at pods and claims: set KUBECONFIG, or --context"
        ) from None


class Progress:
    """Looks at a run's pods through the Kubernetes API, where that can be reached."""

    def __init__(self, connection: Connection, run_id: str) -> None:
        self._connection, self._run_id = connection, run_id
        self._api: Api | None = None
        self._not_before = 0.0
        self._told: dict[str, tuple[float, str]] = {}
        """By pod: when it was looked at, and what it told."""

    def __call__(self, step: Step) -> str:
        """The newest line of progress of a step, or why its pod waits; '' for neither."""
        pod = step.pods[-1] if step.pods else ""
        at, line = self._told.get(pod, (-LOOK_SECONDS, ""))
        now = time.monotonic()
        if not pod or now - at < LOOK_SECONDS or now < self._not_before:
            return line
        try:
            line = self._look(step)
        except (ApiError, StorageError, InputError):
            self._not_before = now + OFF_SECONDS
        self._told[pod] = (now, line)
        return line

    def _look(self, step: Step) -> str:
        api = self._api = self._api or api_of(self._connection)
        query = {"labelSelector": f"{KFP_RUN}={self._run_id}"}
        found = api.call("GET", core(api.namespace, "pods"), query=query).get("items", [])
        pod = pods.of_step(found, step)
        if pod is None:
            return ""
        if waits := pods.waits_for(pod):
            return f"waits: {waits}"
        lines = (LINE.search(each) for each in pods.log(api, pod, tail=LOOKED_BACK))
        told = [match[0].strip() for match in lines if match]
        return told[-1] if told else ""
