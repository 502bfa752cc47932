"""The steps of our pipelines, each with its volumes, resources and credentials.

A pipeline creates `Steps` from its form and connects those that it needs in `exit_handler`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from kfp import dsl, kubernetes
from kfp.dsl.pipeline_channel import PipelineChannel

from kfp_ddp.components.changes.component import changes
from kfp_ddp.components.data_sync.component import data_sync
from kfp_ddp.components.dataset_volume.component import dataset_volume
from kfp_ddp.components.deploy.component import deploy
from kfp_ddp.components.evaluate.component import evaluate
from kfp_ddp.components.export.component import export
from kfp_ddp.components.gate.component import gate as judge
from kfp_ddp.components.predict.component import predict
from kfp_ddp.components.preflight.component import preflight
from kfp_ddp.components.publish.component import publish
from kfp_ddp.components.teardown.component import teardown
from kfp_ddp.components.train.component import train
from kfp_ddp.components.tune.component import tune
from kfp_ddp.core.folders import SCRATCH
from kfp_ddp.core.step import SECRET
from kfp_ddp.jobs.identity import STEP
from kfp_ddp.k8s.api import LAUNCHER, LAUNCHER_DIR
from kfp_ddp.plan.form import EVALUATE_REQUESTS, LAUNCHER_REQUESTS, SYNC_REQUESTS


def named(task: dsl.PipelineTask) -> dsl.PipelineTask:
    """Label the pod of a step with the name of its component."""
    return kubernetes.add_pod_label(task, STEP, task.component_spec.name)


def launching(task: dsl.PipelineTask, secret: Any = LAUNCHER) -> dsl.PipelineTask:
    """Give a step that launches or deletes the token of the launcher's account, if it exists.

    A step that runs a network of a user's own must not have it; `secret` may be an output.
    """
    return kubernetes.use_secret_as_volume(
        task, secret_name=secret, mount_path=LAUNCHER_DIR, optional=True
    )


def small(task: dsl.PipelineTask) -> dsl.PipelineTask:
    """Set the resources of a step that only makes requests."""
    named(task).set_cpu_request("100m").set_cpu_limit("1")
    return task.set_memory_request("256Mi").set_memory_limit("1Gi")


def sized(
    task: dsl.PipelineTask,
    requests: Mapping[str, str],
    cpu: Any,
    memory: Any,
    gpus: Any = None,
    gpu_resource: Any = None,
) -> dsl.PipelineTask:
    """Set requests, and limits that may be outputs of an earlier step."""
    limits = (cpu, memory, gpus, gpu_resource)
    channels = [limit for limit in limits if isinstance(limit, PipelineChannel)]
    task.register_pipeline_channels(channels)  # so that groups around the task pass them on
    named(task).set_cpu_request(requests["cpu"]).set_cpu_limit(cpu)
    task.set_memory_request(requests["memory"]).set_memory_limit(memory)
    if gpus is not None:
        task.set_accelerator_type(gpu_resource).set_accelerator_limit(gpus)
    return task


def no_eviction(task: dsl.PipelineTask) -> dsl.PipelineTask:
    """Ask autoscalers and drains not to evict a step that runs for hours."""
    kubernetes.add_pod_annotation(task, "cluster-autoscaler.kubernetes.io/safe-to-evict", "false")
    kubernetes.add_pod_annotation(task, "karpenter.sh/do-not-disrupt", "true")
    # A PodDisruptionBudget in deploy/eviction selects by this label.
    return kubernetes.add_pod_label(task, "kfp-ddp/evict", "false")


class Claims(NamedTuple):
    """Which PVCs a pipeline mounts; an emptyDir replaces a missing one."""

    data: bool = True
    """False: each pod that reads the dataset downloads it."""
    work: bool = True
    """False: the runs' folders are below a bucket's prefix."""


Outputs = Mapping[str, Any]
"""Outputs of a step by name, or constants in their place."""


class Steps:
    """Steps of one pipeline; the first one checks its form."""

    def __init__(
        self, form: dict[str, Any], claims: Claims, plan: dict[str, Any] | None = None
    ) -> None:
        """Add `preflight`, which gets `form`, unless `plan` has its outputs."""
        self.form = {name: value for name, value in form.items() if name != "bucket_secret"}
        self.claims = claims
        self.secret = form["bucket_secret"]
        self.work = form.get("work_claim" if claims.work else "work")
        self.keep = {"keep": form["keep"]} if "keep" in form else {}
        self.at = {} if claims.work else {"work_dir": self.work}
        self.plan: Any = plan or self._checked()

    def _checked(self) -> Any:
        # Outside the exit handler: without the PVC, the pod of teardown could not start either.
        inputs = {"run_id": dsl.PIPELINE_JOB_ID_PLACEHOLDER}
        if not self.claims.data:
            inputs["publish"] = "each-node"
        first = preflight(**self.form, **inputs).set_display_name("preflight: check settings")
        # Each million objects of the listing take 200 MB.
        small(first.set_caching_options(False)).set_memory_limit("4Gi")
        return launching(self.with_bucket(first)).outputs

    def with_bucket(self, task: dsl.PipelineTask) -> dsl.PipelineTask:
        """Give a step the credentials of the bucket's secret, if that exists."""
        return kubernetes.use_secret_as_volume(
            task, secret_name=self.secret, mount_path=SECRET, optional=True
        )

    def mounted(self, task: dsl.PipelineTask, data: Any, *, runs: bool = True) -> dsl.PipelineTask:
        """Mount volumes and credentials, and disable the cache: content changes under a path.

        `data` is the PVC of the dataset, None for a step that does not read it; `runs`: whether it
        uses the runs' folders.
        """
        claims = self.claims
        reads = data is not None
        if claims.data and reads:
            kubernetes.mount_pvc(task, pvc_name=data, mount_path="/data")
        if claims.work and runs:
            kubernetes.mount_pvc(task, pvc_name=self.work, mount_path="/work")
        lacks_claim = not (claims.data and claims.work)
        if lacks_claim and (runs or reads):
            kubernetes.empty_dir_mount(task, volume_name="scratch", mount_path=SCRATCH)
        return self.with_bucket(task.set_caching_options(False))

    def computing(self, task: dsl.PipelineTask) -> dsl.PipelineTask:
        """Set the resources of a step that evaluates."""
        limits = (self.plan["evaluate_cpu"], self.plan["evaluate_memory"])
        gpus = (self.plan["evaluate_gpus"], self.plan["gpu_resource"])
        return sized(task, EVALUATE_REQUESTS, *limits, *gpus)

    def exit_handler(self, name: str = "training") -> dsl.ExitHandler:
        """Return an exit handler: teardown deletes the run's jobs, also after failure or cancel."""
        last = teardown(
            run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            backend=self.form["backend"],
            job=self.form["job"],
            **self.at,
            **self.keep,
        ).set_display_name("teardown: clean up")
        small(launching(self.mounted(last, None)))
        return dsl.ExitHandler(last, name=name)

    def data(self) -> Outputs:
        """Sync the source, and prepare its version for mounting."""
        return self.published(self.synced())

    def synced(self) -> dsl.PipelineTask:
        """Return the task that syncs the source to a version."""
        plan = self.plan
        task = data_sync(
            source=self.form["source"],
            dataset=plan["dataset"],
            options=plan["sync"],
            run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            layout=plan["layout"],
        ).set_display_name("data-sync: copy and verify")
        self.mounted(task, plan["data_claim"], runs=False)
        return no_eviction(sized(task, SYNC_REQUESTS, plan["sync_cpu"], plan["sync_memory"]))

    def published(self, synced: dsl.PipelineTask) -> Outputs:
        """Prepare the version of a sync for mounting, and return its `path` and `claim`."""
        plan = self.plan
        volume = dataset_volume(
            dataset=synced.outputs["dataset"],
            digest=synced.outputs["digest"],
            path=synced.outputs["path"],
            claim=plan["data_claim"],
            publish=plan["publish"],
            source=self.form["source"],
            sync=plan["sync"],
            run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
        ).set_display_name("dataset-volume: prepare mounts")
        outputs: Outputs = small(launching(volume.set_caching_options(False))).outputs
        return outputs

    def changes(self, synced: dsl.PipelineTask) -> dsl.PipelineTask:
        """Return the task that compares data and settings with the last published attempt."""
        task = changes(
            digest=synced.outputs["digest"],
            destination=self.form["destination"],
            model_name=self.form["model_name"],
            training=self.plan["training"],
            gate=self.plan["gate"],
            job=self.plan["job"],
        ).set_display_name("changes: compare with last run")
        return small(self.mounted(task, None))

    def trained(self, data: Outputs) -> Outputs:
        """Train with DDP, and return `checkpoint` and `run_dir`."""
        own = {"task_id": dsl.PIPELINE_TASK_ID_PLACEHOLDER}
        return self._training(train, "train: DDP on all ranks", data, **own)

    def swept(self, data: Outputs) -> Outputs:
        """Train the trials of a sweep, and return `checkpoint` and `run_dir` of the best."""
        return self._training(tune, "tune: train trials", data, sweep=self.plan["sweep"])

    def _training(self, component: Any, title: str, data: Outputs, **more: Any) -> Outputs:
        task = component(
            run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            task_name=dsl.PIPELINE_TASK_NAME_PLACEHOLDER,
            dataset_path=data["path"],
            training=self.plan["training"],
            backend=self.form["backend"],
            job=self.plan["job"],
            **self.at,
            **more,
        ).set_display_name(title)
        launching(self.mounted(task, data["claim"]), self.plan["train_token"])
        limits = (self.plan["train_cpu"], self.plan["train_memory"])
        outputs: Outputs = no_eviction(sized(task, LAUNCHER_REQUESTS, *limits)).outputs
        return outputs

    def evaluated(self, data: Outputs, model: Outputs, **more: Any) -> Outputs:
        """Evaluate a model, and the champion if needed; return `accuracy` and `evaluation`."""
        task = evaluate(
            checkpoint=model["checkpoint"],
            run_dir=model["run_dir"],
            dataset_path=data["path"],
            champion=self.plan["champion"],
            options=self.plan["measuring"],
            backend=self.plan["evaluate_backend"],
            job=self.plan["evaluate_job"],
            run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            **more,
        ).set_display_name("evaluate: measure accuracy")
        launching(self.mounted(task, data["claim"]), self.plan["evaluate_token"])
        outputs: Outputs = self.computing(task).outputs
        return outputs

    def predicted(self) -> None:
        """Predict the objects of the source, and complete the table."""
        form = self.form
        task = predict(
            **{name: form[name] for name in ("source", "bundle", "table", "backend", "job")},
            options=form["prediction"],
            run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            task_name=dsl.PIPELINE_TASK_NAME_PLACEHOLDER,
            task_id=dsl.PIPELINE_TASK_ID_PLACEHOLDER,
        ).set_display_name("predict: one row for each object")
        limits = (self.plan["evaluate_cpu"], self.plan["evaluate_memory"], form["predict_gpus"])
        no_eviction(sized(self.mounted(task, None), EVALUATE_REQUESTS, *limits, "nvidia.com/gpu"))

    def judged(self, evaluation: Outputs, **more: Any) -> dsl.PipelineTask:
        """Return the gate's task, with `more` inputs."""
        task = judge(
            accuracy=evaluation["accuracy"],
            evaluation=evaluation["evaluation"],
            rules=self.plan["gate"],
            champion=self.plan["champion"],
            **more,
        ).set_display_name("gate: accept or reject")
        return small(self.mounted(task, None))

    def exported(self, data: Outputs, model: Outputs, evaluation: Outputs, **more: Any) -> Any:
        """Export a bundle of a model, compared on images of `data`, and return its folder."""
        task = export(
            checkpoint=model["checkpoint"],
            run_dir=model["run_dir"],
            dataset_path=data["path"],
            evaluation=evaluation["evaluation"],
            model_name=self.form["model_name"],
            release=self.plan["release"],
            **more,
        ).set_display_name("export: tested bundle")
        return self.computing(self.mounted(task, data["claim"])).outputs["Output"]

    def published_if_blessed(
        self, data: Outputs, model: Outputs, evaluation: Outputs, attempt: Any = None
    ) -> None:
        """Export and judge a model, publish it if all rules hold, and record it under `attempt`."""
        record = {} if attempt is None else {"attempt": attempt}
        bundle = self.exported(data, model, evaluation)
        verdict = self.judged(evaluation, bundle=bundle, **record)
        self.published_if(verdict, bundle, evaluation, **record)

    def published_if(
        self, verdict: dsl.PipelineTask, bundle: Any, evaluation: Outputs, **record: Any
    ) -> None:
        """Publish a bundle if the gate's task blesses it; `record` are further inputs."""
        with dsl.If(verdict.outputs["Output"] == True, name="blessed"):  # noqa: E712
            task = publish(
                bundle=bundle,
                evaluation=evaluation["evaluation"],
                model_name=self.form["model_name"],
                destination=self.form["destination"],
                champion=self.plan["champion"],
                champion_version=verdict.outputs["champion_version"],
                release=self.plan["release"],
                run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
                **record,
                **self.keep,
            ).set_display_name("publish: upload bundle")
            small(self.mounted(task, None))
            with dsl.If(self.plan["service"] != "", name="service"):
                rollout = deploy(
                    bundle=task.outputs["destination"],
                    model_name=self.form["model_name"],
                    release=self.plan["release"],
                    run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
                ).set_display_name("deploy: canary, then promote")
                small(launching(self.with_bucket(rollout.set_caching_options(False))))
