"""Steps in a pod, as KFP runs them: emissary above each, a Workflow that owns it."""

import json
import threading
import uuid
from typing import Any, Self

from tests.e2e.harness import step_pod, workflow
from tests.e2e.harness.grounds import IMAGE, UID, Grounds, until
from tests.e2e.harness.running import Attempt, evict, run_in, signal_step

TRAINER = "ghcr.io/kfp-ddp/trainer:0.2.0"

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
    print("DONE", done.job["metadata"]["name"], flush=True)

main(**json.loads(sys.argv[1]))
"""


class Step:
    """One task of one run; `start` runs its pod once, again under the same name if asked."""

    def __init__(
        self,
        grounds: Grounds,
        name: str,
        *,
        image: str = IMAGE,
        claims: dict[str, str] | None = None,
        run_id: str = "",
        grace: float = 0.2,
    ) -> None:
        """`claims` by the path where they are mounted; `program` sets what runs."""
        self.grounds = grounds
        self.run_id = run_id or str(uuid.uuid4())
        self.workflow = workflow.create(grounds, "launching", self.run_id)
        owner = workflow.owner(self.workflow)
        self.name = f"{owner['name']}-{name}"
        self.pod = step_pod.manifest(
            name=self.name,
            image=image,
            command=[],
            environment={**grounds.environment, "STEP_GRACE": str(grace)},
            resources={"requests": {"cpu": "50m"}},
            platform={},
            resolve=str,
        )
        for path, claim in (claims or {}).items():
            step_pod.mount(self.pod, claim, path)
        self.pod["metadata"]["labels"] |= {"workflows.argoproj.io/workflow": owner["name"]}
        self.pod["metadata"]["ownerReferences"] = [owner]
        self.pod["spec"]["serviceAccountName"] = grounds.service_account
        self.pod["spec"]["securityContext"] = {"runAsUser": UID}
        self.attempts: list[Attempt] = []

    def program(self, code: str, fields: dict[str, Any]) -> None:
        """Let the pod run a Python program, with fields as JSON in its argument."""
        command = ["python3", "-u", "-c", code, json.dumps(fields)]
        self.pod["spec"]["containers"][0]["args"] = command

    def start(self, seconds: float = 300.0) -> Self:
        """Run the pod, for so long at most; `wait` for it."""
        attempt = Attempt(self.grounds, self.pod)
        self.attempts.append(attempt)
        self._thread = threading.Thread(target=attempt.wait, args=(seconds,), daemon=True)
        self._thread.start()
        return self

    def wait(self, seconds: float = 240.0) -> str:
        """Return how the latest pod ended: Succeeded, Failed or Lost."""
        self._thread.join(seconds)
        assert self.attempts[-1].ended is not None, f"it is still running:\n{self.log()}"
        return str(self.attempts[-1].ended)

    def log(self) -> str:
        """Return the log of all its pods."""
        return "\n".join(attempt.log() for attempt in self.attempts)

    def saw(self, text: str, seconds: float = 120.0) -> None:
        """Wait until the log has the text."""
        try:
            until(lambda: text in self.log(), repr(text), seconds)
        except TimeoutError as error:
            raise AssertionError(f"{error}:\n{self.log()}") from None

    def terminate(self) -> None:
        """Terminate the run as KFP does, without the signal a second later."""
        workflow.terminate(self.grounds, self.workflow["metadata"]["name"])

    def signal(self) -> None:
        """Send the signal as Argo does a second after that."""
        signal_step(self.grounds, self.name)

    def evict(self) -> None:
        """Delete the pod, as a drained node does; Argo runs the step again."""
        evict(self.grounds, self.name, seen=False)

    def freeze(self) -> None:
        """Stop its processes, as on a node that hangs, and wait for what they wrote before."""
        run_in(self.grounds, self.name, ["sh", "-c", "kill -STOP -1"])
        text = self.grounds.core.read_namespaced_pod_log(self.name, self.grounds.namespace)
        last = text.splitlines()[-1]
        until(lambda: last in self.log(), repr(last), 60)

    def kill(self) -> None:
        """Remove the pod as a lost node does: without a signal."""
        self.grounds.core.delete_namespaced_pod(
            self.name, self.grounds.namespace, grace_period_seconds=0
        )

    def jobs(self, kind: str = "pytorchjob") -> list[dict[str, Any]]:
        """Return the jobs of this run."""
        return self.grounds.jobs(self.run_id, kind)

    def workers(self) -> list[Any]:
        """Return the pods of this run's jobs."""
        return self.grounds.workers(self.run_id)


class LaunchStep(Step):
    """A step that launches a job."""

    def __init__(
        self, grounds: Grounds, spec: dict[str, Any], *, work_claim: str = "", **more: Any
    ) -> None:
        super().__init__(
            grounds, "train", claims={"/work": work_claim} if work_claim else {}, **more
        )
        fields = {
            "run_id": self.run_id,
            "task_name": "train",
            "task_id": "7",
            "run_dir": f"/work/{self.run_id}" if work_claim else "",
            "spec": small(spec),
        }
        self.program(LAUNCH, fields)


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
