"""Play a compiled pipeline with KFP's local orchestrator, each step as a pod.

The orchestrator keeps arguments, placeholders, conditions, nested DAGs and exit handlers. Two of
its functions are replaced: the handler that runs a task's command, and, to know which task that
is, the one that calls it.
"""

import contextlib
import contextvars
import copy
import hashlib
import json
import threading
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from kfp import components, local
from kfp.local import (
    logging_utils,
    placeholder_utils,
    status,
    subprocess_task_handler,
    task_handler_interface,
)
from kfp.local import utils as local_utils
from kfp.local.orchestrator import enhanced_dag_orchestrator, task_executor

from kfp_ddp.core.container_images import Images
from tests.e2e.harness import kfp_pods, step_pod, task_config, workflow
from tests.e2e.harness.grounds import IMAGES, Folder, Grounds
from tests.e2e.harness.running import Attempt, forget, signal_step

LOST_PODS = 2  # Argo's limit for pods that are lost, in KFP's configuration


@dataclass
class Step:
    """One task of a run: its pod's name, its log over all attempts, and how it ended."""

    name: str
    pod: str
    attempts: list[Attempt] = field(default_factory=list)
    outputs: dict[str, Any] = field(default_factory=dict)
    succeeded: bool | None = None

    @property
    def log(self) -> str:
        return "\n".join(attempt.log() for attempt in self.attempts)


@dataclass(frozen=True)
class _Task:
    """What the orchestrator knows of the task that it runs, and the handler does not."""

    name: str
    platform: dict[str, Any]
    container: Any
    component: Any
    store: Any


_run: contextvars.ContextVar["Run | None"] = contextvars.ContextVar("run", default=None)
_task: contextvars.ContextVar[_Task] = contextvars.ContextVar("task")


class Run:
    """One run of a compiled pipeline; `play` it, or `start` it and act while it goes on."""

    def __init__(
        self,
        grounds: Grounds,
        compiled: Path,
        arguments: dict[str, Any],
        *,
        artifacts_claim: str,
        artifacts: Folder,
        mirror: Path,
        grace: float = 0.2,
        images: Images = IMAGES,
        run_id: str = "",
    ) -> None:
        """`artifacts` reads the claim that is mounted, in each step, where `mirror` lies here."""
        self.id = run_id or str(uuid.uuid4())
        self.steps: dict[str, Step] = {}
        self.ids: Counter[str] = Counter()
        """How many ids tasks of a name were given."""
        self.succeeded: bool | None = None
        self.grounds = grounds
        text = images.put_into(compiled.read_text(encoding="utf-8"))
        self._document = components.load_component_from_text(text)
        self._arguments = arguments
        self._claim, self._artifacts, self._mirror = artifacts_claim, artifacts, mirror
        self._grace = grace
        self._terminated = threading.Event()
        self._thread = threading.Thread(target=self._play, name=f"run-{self.id[:8]}", daemon=True)
        self._failure: BaseException | None = None
        self.workflow = workflow.create(grounds, self._spec.pipeline_info.name, self.id)

    @property
    def _spec(self) -> Any:
        return self._document.pipeline_spec

    def play(self) -> "Run":
        """Run it to its end; the run itself, whether it succeeded or not."""
        return self.start().wait()

    def start(self) -> "Run":
        """Begin it in a thread."""
        self._thread.start()
        return self

    def wait(self, seconds: float = 600.0) -> "Run":
        """Wait for the end; raises what the harness itself raised."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"the run goes on after {seconds:.0f} s"
        if self._failure is not None:
            raise self._failure
        return self

    def terminate(self) -> None:
        """Cancel the run: the Workflow's deadline becomes 0, a second later comes the signal."""
        workflow.terminate(self.grounds, self.workflow["metadata"]["name"])
        self._terminated.wait(1.0)
        self._terminated.set()
        for step in list(self.steps.values()):
            if step.succeeded is None:
                signal_step(self.grounds, step.pod)

    def retried(self) -> "Run":
        """What *Retry* makes of a run whose first step failed: the same one, from there on."""
        assert self.succeeded is False
        for step in self.steps.values():
            forget(self.grounds, step.pod)
        again = copy.copy(self)
        again.steps, again.ids, again.succeeded = {}, Counter(), None
        again._terminated = threading.Event()
        again._thread = threading.Thread(target=again._play, daemon=True)
        return again

    def artifact(self, task: str, name: str) -> bytes:
        """The content of an artifact that a task has put out."""
        uri = Path(self.steps[task].outputs[name].uri)
        content = self._artifacts.read(str(uri.relative_to(self._mirror)))
        assert content is not None, f"{task} left no {name}"
        return content

    def explain(self) -> str:
        """How each step ended, with the end of its log, for a failing assertion."""
        return "\n".join(
            f"--- {step.name}: {step.succeeded}, {len(step.attempts)} attempts\n"
            + step.log.rsplit("\n}\n", 1)[-1][-6000:]  # without the executor's input
            for step in self.steps.values()
        )

    def _play(self) -> None:
        _run.set(self)
        try:
            _, ended = enhanced_dag_orchestrator.run_enhanced_dag(
                pipeline_resource_name=self.workflow["metadata"]["name"],
                dag_component_spec=self._spec.root,
                executors=self._executors(),
                components=dict(self._spec.components.items()),
                dag_arguments=self._arguments,
                pipeline_root=str(self._mirror),
                runner=local.SubprocessRunner(use_venv=False),
                unique_pipeline_id=self.id,
                fail_stack=[],
            )
            self.succeeded = ended == status.Status.SUCCESS
        except BaseException as error:  # noqa: BLE001 - raised again by wait()
            self._failure = error

    def _executors(self) -> dict[str, Any]:
        executors = self._spec.deployment_spec["executors"].items()
        return {name: local_utils.struct_to_executor_spec(spec) for name, spec in executors}

    def platform(self, label: str) -> dict[str, Any]:
        """The platform spec of an executor."""
        everything = json_format.MessageToDict(self._document.platform_spec)
        kubernetes = everything.get("platforms", {}).get("kubernetes", {})
        result: dict[str, Any] = (
            kubernetes.get("deploymentSpec", {}).get("executors", {}).get(label, {})
        )
        return result

    def has_nothing_to_clean_up(self, task_spec: Any) -> bool:
        """Whether it is the handler of a group that never began: on the backend a hook of it."""
        if not task_spec.HasField("trigger_policy"):
            return False
        tasks = self._spec.root.dag.tasks
        before = [
            name for group in task_spec.dependent_tasks for name in tasks[group].dependent_tasks
        ]
        return any(name in self.steps and not self.steps[name].succeeded for name in before)

    def execute(self, task: _Task, image: str, command: list[str], env: dict[str, str]) -> bool:
        """Run a step's pod to its end, again if it is lost; whether it ended well."""
        owner = workflow.owner(self.workflow)
        digest = hashlib.sha256(f"{self.id}/{task.name}".encode()).hexdigest()[:8]
        step = Step(task.name, f"{owner['name']}-{task.name}-{digest}"[-63:].lstrip("-"))
        self.steps[task.name] = step
        pod = step_pod.manifest(
            name=step.pod,
            image=image,
            command=[],
            environment={**env, **self.grounds.environment, "STEP_GRACE": str(self._grace)},
            resources=kfp_pods.resources(task.container.resources, command),
            platform=task.platform,
            resolve=lambda parameter: _value(parameter, task.store),
        )
        task_config.pass_through(pod, command, task.component)
        pod["spec"]["containers"][0]["args"] = command
        step_pod.mount(pod, self._claim, str(self._mirror))
        pod["metadata"]["labels"] |= {
            "pipeline/runid": self.id,
            "pipelines.kubeflow.org/v2_component": "true",
            "workflows.argoproj.io/workflow": owner["name"],
        }
        node = f"{owner['name']}.root.training.{task.name}.executor"
        pod["metadata"]["annotations"]["workflows.argoproj.io/node-name"] = node
        pod["metadata"]["ownerReferences"] = [owner]
        pod["spec"]["serviceAccountName"] = self.grounds.service_account
        kfp_pods.complete(self.grounds, pod)
        ended = "Lost"
        while ended == "Lost" and len(step.attempts) <= LOST_PODS:
            attempt = Attempt(self.grounds, pod)
            step.attempts.append(attempt)
            ended = attempt.wait()
            if self._terminated.is_set() and ended != "Succeeded":
                break
        if ended == "Succeeded":
            self._fetch(command)
        step.succeeded = ended == "Succeeded"
        return step.succeeded

    def _fetch(self, command: list[str]) -> None:
        """Bring what the step says of its outputs to where the orchestrator reads it."""
        fields = json.loads(command[command.index("--executor_input") + 1])
        path = Path(fields["outputs"]["outputFile"])
        content = self._artifacts.read(str(path.relative_to(self._mirror)))
        if content is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


class PodTask(task_handler_interface.ITaskHandler):  # type: ignore[misc]
    """KFP's interface to whatever runs a task's command."""

    def __init__(self, run: Run, image: str, command: list[str], env: dict[str, str]) -> None:
        self._run, self._image, self._command, self._env = run, image, command, env

    def run(self) -> Any:
        """Run the task's pod; kfp.local's status."""
        good = self._run.execute(_task.get(), self._image, self._command, self._env)
        return status.Status.SUCCESS if good else status.Status.FAILURE


_execute = task_executor.execute_single_task
_Subprocess = subprocess_task_handler.SubprocessTaskHandler
_indented = logging_utils.indented_print
_logger = logging_utils.local_logger_context
_warn = task_executor._warn_local_only_noops
_random_id = placeholder_utils.make_random_id


def _execute_task(**known: Any) -> Any:
    """`execute_single_task`, which tells the handler what task it is."""
    run = _run.get()
    if run is None:
        return _execute(**known)
    if run.has_nothing_to_clean_up(known["task_spec"]):
        return {}, status.Status.SUCCESS
    component = known["components"][known["task_spec"].component_ref.name]
    label = component.executor_label
    name = known["task_name"]
    _task.set(
        _Task(
            name=name,
            platform=run.platform(label),
            container=known["executors"][label].container,
            component=component,
            store=known["io_store"],
        )
    )
    outputs, ended = _execute(**known)
    run.steps[name].outputs = outputs
    return outputs, ended


def _task_id() -> str:
    """The id of the task that is about to run, which it has again when its run is retried."""
    run = _run.get()
    if run is None:
        return str(_random_id())
    name = _task.get().name
    run.ids[name] += 1
    digest = hashlib.sha256(f"{run.id}/{name}/{run.ids[name]}".encode()).hexdigest()
    return str(int(digest[:8], 16))


def _handler(
    image: str, full_command: list[str], env_vars: dict[str, str] | None = None, **known: Any
) -> Any:
    run = _run.get()
    if run is not None:
        return PodTask(run, image, full_command, env_vars or {})
    return _Subprocess(image=image, full_command=full_command, env_vars=env_vars, **known)


def _install() -> None:
    """Put the replacements in place; outside of a `Run` they do what the originals do.

    Threads play runs at once, so what belongs to the process alone stays as it is within a run:
    the root logger, the built-in print, and warnings of settings that have an effect here.
    """

    def outside_runs(original: Any) -> Any:
        def wrapper(*args: Any, **known: Any) -> Any:
            return original(*args, **known) if _run.get() is None else contextlib.nullcontext()

        return wrapper

    task_executor.execute_single_task = _execute_task
    task_executor._warn_local_only_noops = outside_runs(_warn)
    placeholder_utils.make_random_id = _task_id
    subprocess_task_handler.SubprocessTaskHandler = _handler
    logging_utils.indented_print = outside_runs(_indented)
    logging_utils.local_logger_context = outside_runs(_logger)


def _value(parameter: dict[str, Any], store: Any) -> str:
    """A parameter of the platform spec, as KFP's driver finds it."""
    if "componentInputParameter" in parameter:
        return str(store.get_parent_input(parameter["componentInputParameter"]))
    if "taskOutputParameter" in parameter:
        source = parameter["taskOutputParameter"]
        return str(store.get_task_output(source["producerTask"], source["outputParameterKey"]))
    return str(parameter["runtimeValue"]["constant"])


_install()
