"""A step's pod that launches a job, as KFP runs it: emissary above it, a Workflow that owns it."""

import json
import threading
import uuid
from typing import Any

from kubernetes import client

from tests.e2e.harness import step_pod, workflow
from tests.e2e.harness.grounds import IMAGE, UID, Grounds, patiently, until
from tests.e2e.harness.running import Attempt, evict, run_in, signal_step

TRAINER = "ghcr.io/kfp-ddp/trainer:0.1.0"
PYTORCHJOB = ("kubeflow.org", "v1", "pytorchjobs")
TRAINJOB = ("trainer.kubeflow.org", "v1alpha1", "trainjobs")

LAUNCH = """
import json, sys
from pathlib import Path
from kfp_ddp.k8s.api import Api
from kfp_ddp.jobs.run import launch
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.core.step import step

@step
def main(run_id, task_name, task_id, run_dir, spec):
    folder = Path(run_dir) if run_dir else None
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    done = launch(LaunchSpec.create(**spec), run_id, task_name, task_id, Api.connect(), folder)
    print("DONE", done.job["metadata"]["name"], done.attempts, flush=True)

main(**json.loads(sys.argv[1]))
"""


class LaunchStep:
    """One task of one run; `start` runs its pod once, again under the same name if asked."""

    def __init__(
        self,
        grounds: Grounds,
        spec: dict[str, Any],
        *,
        work_claim: str = "",
        run_id: str = "",
        grace: float = 0.2,
    ) -> None:
        self.grounds = grounds
        self.run_id = run_id or str(uuid.uuid4())
        self.workflow = workflow.create(grounds, "launching", self.run_id)
        owner = workflow.owner(self.workflow)
        fields = {
            "run_id": self.run_id,
            "task_name": "train",
            "task_id": "7",
            "run_dir": f"/work/{self.run_id}" if work_claim else "",
            "spec": small(spec),
        }
        self.pod = step_pod.manifest(
            name=f"{owner['name']}-train",
            image=IMAGE,
            command=["python3", "-u", "-c", LAUNCH, json.dumps(fields)],
            environment={**grounds.environment, "STEP_GRACE": str(grace)},
            resources={"requests": {"cpu": "50m"}},
            platform={},
            resolve=str,
        )
        if work_claim:
            step_pod.mount(self.pod, work_claim, "/work")
        self.pod["metadata"]["labels"] |= {"workflows.argoproj.io/workflow": owner["name"]}
        self.pod["metadata"]["ownerReferences"] = [owner]
        self.pod["spec"]["serviceAccountName"] = grounds.service_account
        self.pod["spec"]["securityContext"] = {"runAsUser": UID}
        self.attempts: list[Attempt] = []

    def start(self, seconds: float = 300.0) -> "LaunchStep":
        """Run the pod, for so long at most; `wait` for it."""
        attempt = Attempt(self.grounds, self.pod)
        self.attempts.append(attempt)
        self._thread = threading.Thread(target=attempt.wait, args=(seconds,), daemon=True)
        self._thread.start()
        return self

    def wait(self, seconds: float = 240.0) -> str:
        """How the latest pod ended: Succeeded, Failed or Lost."""
        self._thread.join(seconds)
        assert self.attempts[-1].ended is not None, f"it goes on:\n{self.log()}"
        return str(self.attempts[-1].ended)

    def log(self) -> str:
        """What all its pods wrote."""
        return "\n".join(attempt.log() for attempt in self.attempts)

    def saw(self, text: str, seconds: float = 120.0) -> None:
        """Wait until the log has the text."""
        try:
            until(lambda: text in self.log(), repr(text), seconds)
        except TimeoutError as error:
            raise AssertionError(f"{error}:\n{self.log()}") from None

    def terminate(self) -> None:
        """What KFP does when its run is terminated, without the signal a second later."""
        workflow.terminate(self.grounds, self.workflow["metadata"]["name"])

    def signal(self) -> None:
        """What Argo does a second after that."""
        signal_step(self.grounds, self.pod["metadata"]["name"])

    def evict(self) -> None:
        """Delete the pod, as a drained node does; Argo runs the step again."""
        evict(self.grounds, self.pod["metadata"]["name"], seen=False)

    def freeze(self) -> None:
        """Stop its processes, as on a node that hangs, and wait for what they wrote before."""
        name, namespace = self.pod["metadata"]["name"], self.grounds.namespace
        run_in(self.grounds, name, ["sh", "-c", "kill -STOP -1"])
        last = self.grounds.core.read_namespaced_pod_log(name, namespace).splitlines()[-1]
        until(lambda: last in self.log(), repr(last), 60)

    def kill(self) -> None:
        """Remove the pod as a lost node does: no signal is seen, nothing can be said."""
        name = self.pod["metadata"]["name"]
        self.grounds.core.delete_namespaced_pod(
            name, self.grounds.namespace, grace_period_seconds=0
        )

    def jobs(self, kind: tuple[str, str, str] = PYTORCHJOB) -> list[dict[str, Any]]:
        """The jobs of this run."""
        group, version, plural = kind
        result = patiently(
            lambda: self.grounds.custom.list_namespaced_custom_object(
                group,
                version,
                self.grounds.namespace,
                plural,
                label_selector=f"kfp-ddp/run-id={self.run_id}",
            )
        )
        items: list[dict[str, Any]] = result["items"]
        return items

    def workers(self) -> list[client.V1Pod]:
        """The pods of this run's jobs."""
        result: list[client.V1Pod] = patiently(
            lambda: self.grounds.core.list_namespaced_pod(
                self.grounds.namespace, label_selector=f"kfp-ddp/run-id={self.run_id}"
            )
        ).items
        return result


def small(spec: dict[str, Any]) -> dict[str, Any]:
    """A specification for a crowded machine."""
    return {
        "image": TRAINER,
        "cpu_request": "20m",
        "run_as_user": UID,
        "shm_size": "64Mi",
        "grace_seconds": 5,
        **spec,
    }


def python(code: str) -> dict[str, Any]:
    """The part of a specification that runs a few lines of Python."""
    return {"command": ["python3", "-u", "-c", code]}
