"""A run to inspect, on KFP or from `run --local`: its state, steps, files and trainings."""

import contextlib
import functools
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, filterfalse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_ddp.client.kfp import runs
from kfp_ddp.client.kfp.connection import open_client, own_namespace
from kfp_ddp.client.kfp.pipelines import graph_of
from kfp_ddp.client.kfp.pods import KfpLogs, list_nodes
from kfp_ddp.client.kfp.steps import OVER, Step, every_step, leaves, steps_of
from kfp_ddp.client.run.kfp_files import kfp_files
from kfp_ddp.client.run.run_files import USER, RunFiles, StoredFiles, open_claim
from kfp_ddp.core import config
from kfp_ddp.core.config import Connection
from kfp_ddp.core.container_images import SETTINGS, Images
from kfp_ddp.core.errors import InputError, KfpDdpError, StorageError
from kfp_ddp.core.files import open_below, read_below
from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.settings import mapping_in
from kfp_ddp.jobs.progress import clock
from kfp_ddp.k8s.api import Api, Object
from kfp_ddp.local.folder import RUNS, LocalStep, is_running, read_local_run
from kfp_ddp.local.results import ENDED, LOG, STARTED, SUMMARY, SWEEP_REPORT
from kfp_ddp.pipelines.document import defaults_of
from kfp_ddp.report.events import is_number
from kfp_ddp.runs.record import TaskRecord, files_of_records, read_run

if TYPE_CHECKING:
    from kfp_server_api import V2beta1Run

    from kfp_ddp.client.kfp.compat import Client


UNFINISHED = "UNFINISHED"
VERDICTS = {"True": "blessed", "False": "not blessed"}
RESULTS = {"bundle": "bundle", "report": "report.html", "sweep": SWEEP_REPORT}
"""What a local run may leave at the top of its folder."""
LARGEST_SUMMARY = 4 << 20
"""Bytes of the summary of a local run."""
LOG_HEAD = "INFO - Streamed logs:"
"""What kfp.local writes before the lines of a step."""
LOG_INDENT = " " * 4
"""What it writes before each of them."""


@dataclass(frozen=True)
class RunInfo:
    """A run on KFP, or a local one."""

    id: str
    name: str
    state: str
    """KFP's, such as FAILED, but CANCELED for each cancelled run; UNFINISHED for a local run that
    was stopped."""
    start: datetime | None
    end: datetime | None
    steps: tuple[Step, ...] = ()
    files: Callable[[], RunFiles] = lambda: StoredFiles("")
    """Open its files; raise KfpDdpError if they cannot be read."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Its arguments."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Its parameters, with the defaults of its pipeline."""
    folder: Path | None = None
    """Output of a local run; None for a run on KFP."""
    results: Mapping[str, Path] = field(default_factory=dict)
    """What a local run left at the top of its folder, by its title."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Results of a complete local run, such as accuracy, blessed and bundle."""
    page: str = ""
    """Its address in the UI."""
    kfp_logs: KfpLogs | None = None
    """The logs that KFP has."""
    cancelled: bool = False
    error: str = ""
    """The server's error."""

    @property
    def word(self) -> str:
        """The argument by which commands find it."""
        return str(self.folder) if self.folder else self.id[:8]

    def headline(self) -> str:
        """Return its name and state, and when and how long it ran, in one line."""
        line = f"{self.name}  {self.state}"
        if self.start and self.end:
            seconds = (self.end - self.start).total_seconds()
            if seconds:
                line += f" after {clock(seconds)}"
        if self.start:
            line += f", started {self.start:%Y-%m-%d %H:%M} UTC"
        return line

    def outcome(self) -> dict[str, str]:
        """Return accuracy and verdict of a local run, '' if unknown; of a run on KFP its name."""
        if self.folder is None:
            return {"name": self.name}
        accuracy = self.summary.get("accuracy")
        return {
            "accuracy": f"{accuracy:.1%}" if is_number(accuracy) else "",
            "verdict": VERDICTS.get(str(self.summary.get("blessed")), ""),
        }

    def document(self) -> dict[str, Any]:
        """Return what `--json` prints of the run."""
        return {
            "run_id": self.id,
            "name": self.name,
            "state": self.state,
            "cancelled": self.cancelled,
            "began": self.start and self.start.isoformat(),
            "ended": self.end and self.end.isoformat(),
            "page": self.page,
            "folder": str(self.folder or ""),
            "parameters": self.parameters,
        }

    def step(self, name: str) -> Step:
        """Return a step by its name or title; raise InputError with the list of steps."""
        steps = every_step(self.steps)
        for step in steps:
            if name in (step.name, step.title):
                return step
        names = ", ".join(step.name for step in steps if not step.steps)
        raise InputError(f"{self.name} has no step {name!r}: it has {names or 'none yet'}")

    def local_log(self, step: str) -> Iterator[str]:
        """Yield the lines that a step of a local run wrote."""
        assert self.folder is not None
        inside = False
        try:
            log = open_below(self.folder, LOG)
        except OSError as error:
            raise InputError(f"cannot read {self.folder / LOG}: {error.strerror}") from None
        with io.TextIOWrapper(log, errors="replace") as file:
            for line in file:
                if start := STARTED.search(line):
                    inside = start[1] == step
                elif ENDED.search(line):
                    inside = False
                elif inside and not line.rstrip().endswith(LOG_HEAD):
                    yield line.rstrip("\n").removeprefix(LOG_INDENT)


class RunFinder(contextlib.ExitStack):
    """Finds runs; connects to the server and starts pods only when needed, until its exit."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection
        self._claims: dict[str, Callable[[str], RunFiles]] = {}
        self._specs: dict[str, Mapping[str, Any] | None] = {}

    def find(self, word: str) -> RunInfo:
        """Return the run of a local folder, else that of the server (see `runs.find_run`)."""
        if Path(word).is_dir():
            return local_run(Path(word))
        if os.sep in word:
            raise InputError(f"folder {word} not found: give one of run --local, or a run's id")
        return self.read(runs.find_run(self.client, word))

    @functools.cached_property
    def client(self) -> "Client":
        """The client of the server."""
        return self.enter_context(open_client(self.connection))

    def api(self) -> Api:
        """Return the cluster's API in the namespace of the runs, or raise InputError."""
        connection = self.connection
        own = own_namespace(connection.context) if self.client.multi_user else ""
        namespace = connection.namespace or own or connection.kfp_namespace
        try:
            return Api.connect(namespace, connection.context)
        except InputError:
            raise InputError(
                "no cluster is configured to read pods and claims: set KUBECONFIG, or --context"
            ) from None

    def read(self, run: "V2beta1Run", nodes: Sequence[Object] | None = None) -> RunInfo:
        """Return a run with its steps, by the `nodes` of its Workflow, which are read for None."""
        if run.run_id not in self._specs:
            self._specs[run.run_id] = runs.spec_of(self.client, run)
        spec = self._specs[run.run_id]
        values = defaults_of(graph_of(spec).get("root", {})) | runs.parameters_of(run)
        if nodes is None:
            with contextlib.suppress(KfpDdpError):
                nodes = list_nodes(self.api(), run.run_id)
        steps = steps_of(run, spec, nodes or ())
        return info_of(
            run,
            self.connection,
            steps=steps,
            files=lambda: self._files(run, values, spec, steps),
            kfp_logs=KfpLogs(self.client, run.run_id),
            values=values,
        )

    def _files(
        self,
        run: "V2beta1Run",
        values: Mapping[str, Any],
        spec: Mapping[str, Any] | None,
        steps: Sequence[Step],
    ) -> RunFiles:
        """Return the files in the run's folder, or what KFP has if that cannot be read."""
        own: RunFiles | None = None
        try:
            own = self._own_files(run, values, spec)
            if run.state not in OVER or own.sizes():
                return own
            problem: KfpDdpError = InputError(f"there are no files of the run in {own.where}")
        except KfpDdpError as error:
            problem = error
        note = f"{problem}; read through KFP, which has no checkpoints and no logs of the ranks"
        kept = kfp_files(self.client, run.run_id, leaves(steps), values, note)
        if kept.sizes():
            return kept
        kind = InputError if isinstance(problem, InputError) else StorageError
        raise kind(
            f"{problem}; KFP itself has the results of a step when it has succeeded, and a run "
            "with work in a bucket (work=gs://…) needs no cluster to be read"
        )

    def _own_files(
        self, run: "V2beta1Run", parameters: Mapping[str, Any], spec: Mapping[str, Any] | None
    ) -> RunFiles:
        work = parameters.get("work")
        claim = parameters.get("work_claim")
        if isinstance(work, str) and is_remote(work):
            return StoredFiles(f"{work.rstrip('/')}/{run.run_id}")
        if not isinstance(claim, str) or not claim:
            raise InputError(
                f"the location of the files of {run.display_name} is not known: its pipeline has "
                "no parameter work or work_claim"
            )
        if claim not in self._claims:
            job = parameters.get("job")
            user = job.get("run_as_user", -1) if isinstance(job, dict) else -1
            user = user if user > 0 else USER  # -1 is the image's own
            reader = open_claim(self.api(), claim, _image(spec), run.service_account or "", user)
            self._claims[claim] = self.enter_context(reader)
        return self._claims[claim](run.run_id)


def info_of(run: "V2beta1Run", connection: Connection, **more: Any) -> RunInfo:
    """Return a run as the server lists it; `more` are further fields."""
    return RunInfo(
        id=run.run_id,
        name=run.display_name,
        state=runs.shown_state(run),
        start=runs.known_time(run.created_at),
        end=runs.known_time(run.finished_at),
        parameters=runs.parameters_of(run),
        page=connection.run_page(run.run_id),
        cancelled=runs.cancelled_at(run) is not None,
        error=(run.error and run.error.message) or "",
        **more,
    )


def local_run(folder: Path) -> RunInfo:
    """Return the run whose output a folder contains; raise InputError if it contains none."""
    running = is_running(folder)  # asked first, as a run records its end before it unlocks
    record = read_local_run(folder)
    if record is None:
        raise InputError(
            f"{folder} contains no run: name one of run --local, such as run-output/latest"
        )
    before_the_end = "RUNNING" if running else UNFINISHED
    state = record.state or ("SUCCEEDED" if record.complete else before_the_end)
    run_id = max((path.name for path in (folder / "work").glob("[!.]*")), default="")

    left = os.listdir(folder)

    def shown_step(step: LocalStep) -> Step:
        # A step that never ended has the state of the run.
        now = state if step.state == "RUNNING" else step.state
        return Step(step.name, step.name, now, _time(step.start), _time(step.end))

    return RunInfo(
        id=run_id,
        name=folder.resolve().name,
        state=state,
        start=_time(record.start),
        end=_time(record.end),
        steps=tuple(map(shown_step, record.steps)),
        files=lambda: StoredFiles(str(folder / "work" / run_id)),
        folder=folder,
        results={title: folder / name for title, name in RESULTS.items() if name in left},
        summary=_summary(folder) if record.complete else {},
    )


def local_runs(most: int, state: str) -> list[RunInfo]:
    """Return the newest runs of the working directory and of `RUNS` in it; '' for any state."""
    folders = chain(Path().glob(f"{RUNS}/*"), Path().glob("*"))
    found = map(local_run, filter(read_local_run, filterfalse(Path.is_symlink, folders)))
    runs = [run for run in found if state.upper() in ("", run.state)]
    runs.sort(key=lambda run: str(run.start), reverse=True)
    return runs[:most]


def _summary(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, InputError):
        return mapping_in(read_below(folder, SUMMARY, LARGEST_SUMMARY))
    return {}


def _time(seconds: float) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds else None


def _image(spec: Mapping[str, Any] | None) -> str:
    """Return a launcher image that the run has pulled, else the configured one."""
    executors = graph_of(spec).get("deploymentSpec", {}).get("executors", {})
    images = sorted(
        str(executor.get("container", {}).get("image", "")) for executor in executors.values()
    )
    for kind in ("launcher", "python"):
        for image in images:
            if kind in image.rpartition("/")[2]:
                return image
    return Images.create(config.chosen(*SETTINGS)).launcher


def read_trainings(files: RunFiles, folder: Path) -> tuple[TaskRecord, ...]:
    """Return the tasks of a run that trained or evaluated; `folder` is for downloads."""
    files.fetch(files_of_records(files.sizes()), folder)
    return tuple(filter(_trained_or_evaluated, read_run(folder)))


def _trained_or_evaluated(task: TaskRecord) -> bool:
    return bool(task.settings or task.events or task.evaluation)
