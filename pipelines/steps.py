"""The steps that pipelines join, each with what it mounts, asks of a node and logs in with.

A pipeline makes a `Steps` of its form, and joins those that it needs:

    steps = Steps(form, Claims())
    with steps.ended():
        data = steps.data()
        model = steps.trained(data)
        steps.published_if_blessed(data, model, steps.evaluated(data, model))
"""

from pathlib import PurePosixPath
from typing import Any, NamedTuple

from kfp import dsl, kubernetes

from kfp_ddp.checks.preflight.parameters import EVALUATE_ASKS, LAUNCHER_ASKS, SYNC_ASKS
from kfp_ddp.components.changes.component import changes
from kfp_ddp.components.data_sync.component import data_sync
from kfp_ddp.components.dataset_volume.component import dataset_volume
from kfp_ddp.components.deploy.component import deploy
from kfp_ddp.components.evaluate.component import evaluate
from kfp_ddp.components.export.component import export
from kfp_ddp.components.gate.component import gate as judge
from kfp_ddp.components.leaderboard.component import leaderboard
from kfp_ddp.components.preflight.component import preflight
from kfp_ddp.components.publish.component import publish
from kfp_ddp.components.teardown.component import teardown
from kfp_ddp.components.train.component import train
from kfp_ddp.core.folders import SCRATCH
from kfp_ddp.core.step import KEY
from kfp_ddp.pipelines import pods

# Keys of the bucket's secret that become environment variables.
SECRET_ENV = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3"),
    *("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN"),
    *("AZURE_STORAGE_CONNECTION_STRING", "AZURE_TENANT_ID", "AZURE_CLIENT_ID"),
    *("AZURE_CLIENT_SECRET", "HF_TOKEN", "HF_ENDPOINT"),
    *("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
    "WANDB_API_KEY",
)


class Claims(NamedTuple):
    """What a pipeline mounts: the claims that its form or preflight name, or an emptyDir."""

    data: bool = True
    """Else each pod that reads the dataset brings it."""
    work: bool = True
    """Else the runs' folders lie below a bucket's prefix."""


class Data(NamedTuple):
    """A version of the dataset as later steps mount it; the channels of earlier steps."""

    path: Any
    claim: Any


class Model(NamedTuple):
    """A checkpoint, and the folder of the run that it is of; channels, or what was given."""

    checkpoint: Any
    run_dir: Any


class Evaluation(NamedTuple):
    """What a model came to; channels."""

    accuracy: Any
    path: Any


class Steps:
    """Steps of one pipeline, the first of which checks its form."""

    def __init__(
        self, form: dict[str, Any], claims: Claims, plan: dict[str, Any] | None = None
    ) -> None:
        """Add `preflight`, whose outputs become `plan`, unless there is one.

        Args:
            form: The pipeline's parameters by name: preflight's inputs and `bucket_secret`.
            claims: What its pods mount.
            plan: What `preflight` would return, as far as the steps need it.
        """
        self.form = {name: value for name, value in form.items() if name != "bucket_secret"}
        self.claims, self.secret = claims, form["bucket_secret"]
        self.work = form.get("work_claim" if claims.work else "work")
        self.keep = {"keep": form["keep"]} if "keep" in form else {}
        self.at = {} if claims.work else {"work_dir": self.work}
        self.plan: Any = plan or self._checked()

    def _checked(self) -> Any:
        """Add `preflight`; its outputs."""
        # Not in the group: where a claim is missing, the pod of teardown could not start either.
        each = {"run_id": dsl.PIPELINE_JOB_ID_PLACEHOLDER}
        each |= {} if self.claims.data else {"publish": "each-node"}
        first = preflight(**self.form, **each).set_display_name("preflight: check all of it")
        pods.waiting(first.set_caching_options(False))
        return self.with_bucket(first).outputs

    def with_bucket(self, task: dsl.PipelineTask) -> dsl.PipelineTask:
        """Give a step the bucket's credentials, if such a secret is there."""
        folder = str(PurePosixPath(KEY).parent)
        kubernetes.use_secret_as_volume(
            task, secret_name=self.secret, mount_path=folder, optional=True
        )
        keys = {key: key for key in SECRET_ENV}
        return kubernetes.use_secret_as_env(
            task, secret_name=self.secret, secret_key_to_env=keys, optional=True
        )

    def mounted(self, task: dsl.PipelineTask, data: Any, *, runs: bool = True) -> dsl.PipelineTask:
        """Mount what a step uses, and switch its cache off: what it reads changes under a path.

        Args:
            task: The step.
            data: The claim of the dataset; None for a step that does not read it.
            runs: Whether it uses the runs' folders.
        """
        claims = self.claims
        if claims.data and data is not None:
            kubernetes.mount_pvc(task, pvc_name=data, mount_path="/data")
        if claims.work and runs:
            kubernetes.mount_pvc(task, pvc_name=self.work, mount_path="/work")
        if not (claims.data and claims.work) and (runs or data is not None):
            kubernetes.empty_dir_mount(task, volume_name="scratch", mount_path=SCRATCH)
        return task.set_caching_options(False)

    def computing(self, task: dsl.PipelineTask) -> dsl.PipelineTask:
        """Let a step use what those that evaluate may."""
        limits = (self.plan["evaluate_cpu"], self.plan["evaluate_memory"])
        gpus = (self.plan["evaluate_gpus"], self.plan["gpu_resource"])
        return pods.working(task, EVALUATE_ASKS, *limits, *gpus)

    def ended(self, name: str = "training") -> dsl.ExitHandler:
        """A group of steps, at whose end, however it comes, nothing of the run is left at work."""
        last = teardown(
            run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            backend=self.form["backend"],
            job=self.form["job"],
            **self.at,
            **self.keep,
        ).set_display_name("teardown: leave nothing")
        self.mounted(last, None)
        pods.waiting(self.with_bucket(last))
        return dsl.ExitHandler(last, name=name)

    def data(self) -> Data:
        """Sync the source, and make its version ready to be mounted."""
        return self.published(self.synced())

    def synced(self) -> dsl.PipelineTask:
        """Sync the source to a version; its task."""
        plan = self.plan
        task = data_sync(
            source=self.form["source"],
            dataset=plan["dataset"],
            options=plan["sync"],
            run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            layout=plan["layout"],
        ).set_display_name("data-sync: copy and verify")
        self.with_bucket(self.mounted(task, plan["data_claim"], runs=False))
        return pods.kept(pods.working(task, SYNC_ASKS, plan["sync_cpu"], plan["sync_memory"]))

    def published(self, synced: dsl.PipelineTask) -> Data:
        """Make a version ready to be mounted.

        Args:
            synced: The task that made it.
        """
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
        ).set_display_name("dataset-volume: for workers")
        pods.waiting(volume.set_caching_options(False))
        return Data(volume.outputs["path"], volume.outputs["claim"])

    def changes(self, synced: dsl.PipelineTask) -> dsl.PipelineTask:
        """Tell whether data or settings are new to the destination; the task of `changes`."""
        task = changes(
            digest=synced.outputs["digest"],
            destination=self.form["destination"],
            model_name=self.form["model_name"],
            training=self.plan["training"],
            gate=self.plan["gate"],
            job=self.plan["job"],
        ).set_display_name("changes: anything new?")
        return pods.waiting(self.with_bucket(self.mounted(task, None)))

    def trained(self, data: Data) -> Model:
        """Train with DDP."""
        task = self._training(data, training=self.plan["training"])
        return Model(task.outputs["checkpoint"], task.outputs["run_dir"])

    def tried(self, data: Data, training: Any) -> dsl.PipelineTask:
        """Train with settings of a sweep, one of several that may fail; the task of `train`."""
        return self._training(data, training=training, may_fail=True)

    def _training(self, data: Data, **more: Any) -> dsl.PipelineTask:
        task = train(
            run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            task_name=dsl.PIPELINE_TASK_NAME_PLACEHOLDER,
            task_id=dsl.PIPELINE_TASK_ID_PLACEHOLDER,
            dataset_path=data.path,
            backend=self.form["backend"],
            job=self.plan["job"],
            **self.at,
            **more,
        ).set_display_name("train: DDP on all ranks")
        # It brings init_from, and without claims the workers read and write buckets with it.
        self.with_bucket(self.mounted(task, data.claim))
        limits = (self.plan["train_cpu"], self.plan["train_memory"])
        return pods.kept(pods.working(task, LAUNCHER_ASKS, *limits))

    def best(self, tried: dsl.PipelineTask) -> Model:
        """Rank what was tried in a loop, and take the best."""
        names = {"run_dirs": "run_dir", "checkpoints": "checkpoint", "failures": "failure"}
        task = leaderboard(**{many: dsl.Collected(tried.outputs[n]) for many, n in names.items()})
        task.set_display_name("leaderboard: rank trials")
        pods.waiting(self.with_bucket(self.mounted(task, None)))
        return Model(task.outputs["checkpoint"], task.outputs["run_dir"])

    def evaluated(self, data: Data, model: Model, **more: Any) -> Evaluation:
        """Evaluate a model, and the champion on the same samples if need be.

        Args:
            data: Whose samples.
            model: What `trained` returned.
            more: Further inputs of `evaluate`.
        """
        task = evaluate(
            checkpoint=model.checkpoint,
            run_dir=model.run_dir,
            dataset_path=data.path,
            champion=self.plan["champion"],
            options=self.plan["measuring"],
            backend=self.plan["evaluate_backend"],
            job=self.plan["evaluate_job"],
            run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            task_name=dsl.PIPELINE_TASK_NAME_PLACEHOLDER,
            task_id=dsl.PIPELINE_TASK_ID_PLACEHOLDER,
            **more,
        ).set_display_name("evaluate: each image once")
        self.computing(self.with_bucket(self.mounted(task, data.claim)))
        return Evaluation(task.outputs["accuracy"], task.outputs["evaluation"])

    def judged(self, evaluation: Evaluation, **more: Any) -> dsl.PipelineTask:
        """Judge an evaluation by the rules; the gate's task, given `more` inputs."""
        task = judge(
            accuracy=evaluation.accuracy,
            evaluation=evaluation.path,
            rules=self.plan["gate"],
            champion=self.plan["champion"],
            **more,
        ).set_display_name("gate: good enough?")
        return pods.waiting(self.with_bucket(self.mounted(task, None)))

    def exported(self, data: Data, model: Model, evaluation: Evaluation) -> Any:
        """Make a bundle of a model; its folder.

        Args:
            data: Whose images prove that the bundle's formats agree.
            model: What was trained.
            evaluation: What it came to.
        """
        task = export(
            checkpoint=model.checkpoint,
            run_dir=model.run_dir,
            dataset_path=data.path,
            evaluation=evaluation.path,
            model_name=self.form["model_name"],
            release=self.plan["release"],
        ).set_display_name("export: a proven bundle")
        self.computing(self.mounted(task, data.claim))
        return task.outputs["Output"]

    def published_if_blessed(
        self, data: Data, model: Model, evaluation: Evaluation, attempt: Any = None
    ) -> None:
        """Export a model, judge it, and publish it if all rules hold.

        Args:
            data: As `trained` was given it.
            model: What was trained.
            evaluation: What it came to.
            attempt: Output of `changes`, by which that is noted; None for no note.
        """
        noted = {} if attempt is None else {"attempt": attempt}
        bundle = self.exported(data, model, evaluation)
        verdict = self.judged(evaluation, bundle=bundle, **noted)
        with dsl.If(verdict.outputs["Output"] == True, name="blessed"):  # noqa: E712
            task = publish(
                bundle=bundle,
                evaluation=evaluation.path,
                model_name=self.form["model_name"],
                destination=self.form["destination"],
                champion=self.plan["champion"],
                champion_version=verdict.outputs["champion_version"],
                release=self.plan["release"],
                run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
                **noted,
                **self.keep,
            ).set_display_name("publish: seal and upload")
            pods.waiting(self.with_bucket(self.mounted(task, None)))
            with dsl.If(self.plan["service"] != "", name="service"):
                self._deployed(task.outputs["destination"])

    def _deployed(self, bundle: Any) -> None:
        """Roll a published bundle out on the service that the release names."""
        task = deploy(
            bundle=bundle,
            model_name=self.form["model_name"],
            release=self.plan["release"],
            run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
        ).set_display_name("deploy: try, promote")
        pods.waiting(self.with_bucket(task.set_caching_options(False)))
