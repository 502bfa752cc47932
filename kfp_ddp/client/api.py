"""The Python API, on which the command line stands: `from kfp_ddp import Client`."""

import contextlib
import dataclasses
import functools
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from kfp_ddp.client import models
from kfp_ddp.client.kfp.pipelines import PipelineVersion, upload
from kfp_ddp.client.kfp.runs import RETRYABLE, find_run, list_runs
from kfp_ddp.client.kfp.schedules import RUN_SETTINGS
from kfp_ddp.client.kfp.steps import OVER
from kfp_ddp.client.run import comparison, download, follow, logs
from kfp_ddp.client.run.compared import Comparison, Trained
from kfp_ddp.client.run.description import Description, describe
from kfp_ddp.client.run.run_info import (
    RunFinder,
    RunInfo,
    info_of,
    local_run,
    local_runs,
    read_trainings,
)
from kfp_ddp.client.scheduling import Schedules
from kfp_ddp.client.submit import function_job, own_package, submission
from kfp_ddp.core import config
from kfp_ddp.core.config import Connection
from kfp_ddp.core.container_images import SETTINGS, Images
from kfp_ddp.core.errors import InputError, NoClusterError
from kfp_ddp.core.folders import with_home
from kfp_ddp.core.machine import require
from kfp_ddp.core.secrets import check_secrets
from kfp_ddp.pipelines.document import Document, is_file, program_of, read
from kfp_ddp.report.render import framed
from kfp_ddp.runs.trials import read_trials

Place = str | Path


class Client:
    """A KFP server, connected when it is needed, with its runs, schedules, models; this machine.

    All methods check their input before they send it, and raise errors of `kfp_ddp.core.errors`.
    """

    def __init__(
        self,
        host: str | None = None,
        namespace: str | None = None,
        connection: Connection | None = None,
        **settings: Any,
    ) -> None:
        """Take settings of `kfp-ddp config`; others are those of environment and files."""
        self._flags = config.checked({"host": host, "namespace": namespace, **settings})
        self.connection = connection or config.connection(self._flags)

    @functools.cached_property
    def finder(self) -> RunFinder:
        """The open connections, and the pods that read files."""
        finder = RunFinder(self.connection)
        weakref.finalize(self, finder.close)
        return finder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finder.close()
        del self.finder

    def chosen(self, *names: str) -> dict[str, Any]:
        """Return the values of settings."""
        return config.chosen(*names, flags=self._flags)

    def plan(
        self, source: Place, pipeline: Any, name: str, inputs: submission.Inputs
    ) -> submission.Submission:
        """Return a checked run, to preview or send; the arguments are as in `run`."""
        chosen = self.chosen(*RUN_SETTINGS, "experiment", "registry", "destination")
        check_secrets({"name": name, **chosen})
        source, pipeline = program_of(source, pipeline)
        document, version = self._pipeline(pipeline or "train_resnet", uploaded=True)
        inputs = inputs._replace(flags={"SOURCE": ("source", source), **inputs.flags})
        configured = {"destination": chosen.pop("destination")}
        arguments = submission.arguments(document, inputs, configured)
        own_package.check_images(document, chosen.pop("registry"))
        name = name or submission.default_name(document, arguments)
        return submission.Submission(document, version, name, arguments=arguments, **chosen)

    def send(self, request: submission.Submission) -> "Run":
        """Start a planned run."""
        if request.version is None:
            pipeline = own_package.with_source(
                request.pipeline, self.finder, self.chosen(*SETTINGS)
            )
            request = dataclasses.replace(request, pipeline=pipeline)
        return Run(self, info_of(request.send(self.finder.client), self.connection))

    def run(
        self, source: Place = "", *, pipeline: Place = "", name: str = "", **settings: Any
    ) -> "Run":
        """Start a run on KFP, which continues when this program ends.

        `source` are images, or a compiled pipeline; `pipeline` is such a file, or the name of a
        built-in or an uploaded one, NAME or NAME@VERSION; '' for train_resnet. The settings are its
        parameters, or settings in them, such as epochs=10.
        """
        inputs = submission.Inputs([*settings.items()])
        return self.send(self.plan(source, pipeline, name, inputs))

    def run_local(
        self,
        source: Place = "",
        output: Place = "",
        *,
        pipeline: Place = "",
        ranks: int = 0,
        fresh: bool = False,
        replace: bool = False,
        **settings: Any,
    ) -> "Run":
        """Run a pipeline on this machine to its end, as `kfp-ddp run --local` with these options.

        The same call resumes a run that was interrupted.
        """
        require("local")
        from kfp_ddp.local import runs

        words = [*settings.items()]
        target = Path(with_home(str(output))) if output else None
        command = runs.Command(str(source), target, words, fresh=fresh, replace=replace)
        folder, _ = runs.execute(command, str(pipeline), ranks)
        return Run(self, local_run(folder))

    def train(
        self,
        func: Any = None,
        *,
        trainer: Any = None,
        runtime: Any = "",
        kind: str = "",
        name: str = "",
        output: Place = "",
        **settings: Any,
    ) -> "Run":
        """Run a Python function as a distributed job: in each rank, under torchrun.

        `settings` are func_args, num_nodes, resources_per_node, packages_to_install, image, env and
        all of the component `job`; `trainer` is an object with such fields, a CustomTrainer. With
        a `runtime` it is a TrainJob, else a PyTorchJob, or another `kind`; local for this machine.
        """
        kind = kind or ("trainjob" if runtime else "pytorchjob")
        inputs = function_job.job_of(func, trainer, runtime, settings)
        with tempfile.TemporaryDirectory() as scratch:
            images = Images.create(self.chosen(*SETTINGS))
            file = function_job.job_pipeline(inputs, kind, images, Path(scratch))
            if kind != function_job.LOCAL:
                return self.run(file, name=name)
            require("local")
            from kfp_ddp.local import runs

            target = Path(with_home(str(output))) if output else None
            command = runs.Command("", target, [("backend", kind)], fresh=True)
            folder, _ = runs.run(file, command)
            return Run(self, local_run(folder))

    def runs(
        self, most: int = 20, experiment: str = "", state: str = "", local: bool = False
    ) -> "list[Run]":
        """Return the newest runs on KFP, of an experiment or in a state, such as failed.

        With `local`, or where no cluster is configured, those in folders of this one.
        """
        if not local:
            # An experiment is of KFP alone.
            absent = () if experiment else (NoClusterError,)
            with contextlib.suppress(*absent):
                listed = list_runs(self.finder.client, most, experiment, state)
                return [Run(self, info_of(run, self.connection)) for run in listed]
        return list(map(functools.partial(Run, self), local_runs(most, state)))

    def get_run(self, run: "Place | Run") -> "Run":
        """Return the run of an id or its start, a name, `last`, or the folder of a local run."""
        return run if isinstance(run, Run) else Run(self, self.finder.find(str(run)))

    def compare(self, *runs: "Place | Run") -> Comparison:
        """Compare the trainings of runs: settings, metrics with their intervals, curves."""
        rows = []
        for info in [self.get_run(run).refresh() for run in runs]:
            with tempfile.TemporaryDirectory() as scratch:
                trainings = read_trainings(info.files(), Path(scratch))
                trials = read_trials(Path(scratch))
            if not trainings:
                raise InputError(
                    f"{info.name} has no training to compare: see kfp-ddp describe {info.word}"
                )
            rows.append(Trained(info, trainings, trials))
        return comparison.compare(rows)

    def upload(self, pipeline: Place, name: str = "", description: str = "") -> PipelineVersion:
        """Upload a pipeline as the newest version, unless that has the same content."""
        check_secrets({"name": name, "description": description})
        document, _ = self._pipeline(pipeline, uploaded=False)
        own_package.check_images(document, self.chosen("registry")["registry"])
        document = own_package.with_source(document, self.finder, self.chosen(*SETTINGS))
        return upload(self.finder.client, document, name, description)

    @property
    def schedules(self) -> Schedules:
        """The recurring runs."""
        return Schedules(self)

    def models(self, name: str) -> models.Model:
        """Return a model at the destination."""
        chosen = self.chosen("destination", "model_registry")
        where = models.open_models(chosen["destination"])
        return models.Model(where, name, chosen["model_registry"])

    def _pipeline(self, name: Place, uploaded: bool) -> tuple[Document, PipelineVersion | None]:
        name = str(name)
        if is_file(name):
            document = read(Path(name))
            check_secrets(document.values())
            return document, None
        built_in = submission.built_in(name, Images.create(self.chosen(*SETTINGS)))
        if built_in:
            return built_in, None
        if uploaded:
            return submission.uploaded(self.finder.client, name)
        near = submission.near(name)
        raise InputError(f"{name} is not a YAML file, and not a built-in pipeline{near}")


class Run:
    """A run on KFP, or of this machine; a notebook shows its steps, progress and curves."""

    def __init__(self, client: Client, info: RunInfo) -> None:
        """Take a run as it was read."""
        self._client = client
        self.info = info
        self.id = info.id

    def __repr__(self) -> str:
        return f"<Run {self.info.name} {self.info.word} {self.info.state} {self.info.page}>"

    def refresh(self) -> RunInfo:
        """Read the run with its steps, also to `info`."""
        self.info = self._client.finder.find(str(self.info.folder or self.id))
        return self.info

    @property
    def summary(self) -> Mapping[str, Any]:
        """Results of a complete local run, such as accuracy, blessed, bundle and report."""
        return self.info.summary

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that `compare` shows, by name; of a sweep those of its best trial."""
        metrics = self._client.compare(self).metrics
        return {metric.name: best.value for metric in metrics if (best := metric.figures[0])}

    @property
    def status(self) -> str:
        """Its present state, such as RUNNING, SUCCEEDED, FAILED or CANCELED."""
        return self.refresh().state

    def wait(self, timeout: float | None = None, show: bool = False) -> Self:
        """Wait for its end; with `show` print a line for each step that changes.

        Raise JobError or RunCancelledError if it did not succeed, TimeoutError after these seconds.
        """
        reload, progress = follow.watched(self._client.finder, self.info)
        view = follow.lines(print, progress) if show else lambda _: None
        self.info = follow.follow(reload, view, timeout)
        follow.check_success(self.info)
        return self

    def logs(self, step: str = "", follow: bool = False, every: bool = False) -> Iterator[str]:
        """Yield the log of a step or all, with `follow` to their end, `every` with KFP's lines."""
        info = self.refresh()
        api = self._client.finder.api
        steps = logs.select_steps(info, step)
        over = info.folder is not None or all(leaf.step.state in OVER for leaf in steps)
        if over or not follow:
            return logs.read(info, steps, api, len(steps) > 1, every, all_of_them=True)
        return logs.follow(info, step, api, self.refresh, len(steps) > 1, every)

    def describe(self, files: bool = True) -> Description:
        """Return how it ended, why, and what to do next; `files` on a PVC start a pod."""
        return describe(self.refresh(), self._client.finder.api, files)

    def download(self, output: Place = "", checkpoint: bool = False) -> download.Results:
        """Download its results to a new folder, by default with its name; all or nothing."""
        info = self.refresh()
        folder = Path(output or info.name.replace("/", "-").strip(".") or info.id)
        download.check_output(folder)
        files = info.files()
        tasks = download.download(files, folder, checkpoint=checkpoint)
        return download.Results(folder, tasks, files.note)

    def cancel(self) -> Self:
        """Cancel it: its job is deleted, its checkpoints remain, and `retry` resumes from them."""
        run = self._on_server()
        if run.state in OVER:
            raise InputError(f"{run.display_name} is already over ({run.state})")
        self._client.finder.client.terminate_run(self.id)
        return self._again()

    def retry(self) -> Self:
        """Resume it, after it failed or was cancelled, without repeating completed steps."""
        run = self._on_server()
        if run.state not in RETRYABLE:
            raise InputError(
                f"{run.display_name} is {run.state}: only a run that failed or was cancelled can "
                "be retried"
            )
        self._client.finder.client.run_service.run_service_retry_run(self.id)
        return self._again()

    def _on_server(self) -> Any:
        if self.info.folder is not None:
            raise InputError(
                f"{self.info.folder} is not a run of KFP: Ctrl-C stops a local run, and the same "
                "command resumes it"
            )
        return find_run(self._client.finder.client, self.id)

    def _again(self) -> Self:
        self.info = info_of(self._on_server(), self._client.connection)
        return self

    def _repr_html_(self) -> str:
        return framed(follow.to_html(self._client.finder, self.refresh()))
