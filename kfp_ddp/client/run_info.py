"""A run to inspect, on KFP or from `run --local`: its state, steps and files."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_ddp.client import runs
from kfp_ddp.client.claim_files import USER, open_claim
from kfp_ddp.client.connection import open_client
from kfp_ddp.client.pipelines import graph_of
from kfp_ddp.client.pods import api_of, list_nodes
from kfp_ddp.client.run_files import RunFiles, StoredFiles
from kfp_ddp.client.steps import Step, every_step, steps_of
from kfp_ddp.core.config import Connection, config
from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.core.folders import is_remote
from kfp_ddp.k8s.api import Api, Object
from kfp_ddp.local.folder import is_running
from kfp_ddp.local.results import ENDED, LOG, STARTED
from kfp_ddp.pipelines.document import defaults_of

if TYPE_CHECKING:
    from kfp_server_api import V2beta1Run

    from kfp_ddp.client.compat import Client

FINISHED = re.compile(r"Pipeline '[^']+' finished with status (\w+)")
LOCAL_STATES = {"SUCCESS": "SUCCEEDED", "FAILURE": "FAILED"}
LOG_HEAD, LOG_INDENT = "INFO - Streamed logs:", " " * 4
"""What kfp.local writes before the lines of a step."""
ARTIFACTS_TIME = re.compile(r"\d{4}(-\d\d){5}-\d{6}$")


@dataclass(frozen=True)
class RunInfo:
    """A run on KFP, or a local one."""

    id: str
    name: str
    state: str
    """KFP's, such as FAILED; UNFINISHED for a local run that was stopped."""
    start: datetime | None
    end: datetime | None
    steps: tuple[Step, ...]
    files: Callable[[], RunFiles]
    """Opens its files; raises KfpDdpError if they cannot be read."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    """Output of a local run; None for a run on KFP."""
    page: str = ""
    """Its address in the UI."""
    pipeline: str = ""
    """Name of the pipeline, as in the URIs of its artifacts."""
    root: str = ""
    """URI of its artifacts; '' if not known."""
    cancelled: bool = False
    error: str = ""
    """The server's error."""

    @property
    def word(self) -> str:
        """The argument by which commands find it."""
        return str(self.folder) if self.folder else self.id[:8]

    def step(self, name: str) -> Step:
        """Return a step by its name or title.

        Raises:
            InputError: it does not exist, with the list of steps.
        """
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
        with (self.folder / LOG).open(errors="replace") as file:
            for line in file:
                if start := STARTED.search(line):
                    inside = start[1] == step
                elif ENDED.search(line):
                    inside = False
                elif inside and not line.rstrip().endswith(LOG_HEAD):
                    yield line.rstrip("\n").removeprefix(LOG_INDENT)


class RunFinder:
    """Finds runs; connects to the server and starts pods only when needed."""

    def __init__(self, connection: Connection, stack: contextlib.ExitStack) -> None:
        self.connection, self._stack = connection, stack
        self._client: Client | None = None
        self._claims: dict[str, Callable[[str], RunFiles]] = {}

    def find(self, word: str) -> RunInfo:
        """Return the run of a local folder, else that of the server (see `runs.find_run`)."""
        if Path(word).is_dir():
            return local_run(Path(word))
        if os.sep in word:
            raise InputError(f"folder {word} not found: give one of run --local, or a run's id")
        return self._remote_run(runs.find_run(self.client, word))

    @property
    def client(self) -> "Client":
        """The client of the server."""
        if self._client is None:
            self._client = self._stack.enter_context(open_client(self.connection))
        return self._client

    def api(self) -> Api:
        """Return the cluster's API in the namespace of the runs.

        Raises:
            InputError: no cluster is configured.
        """
        return api_of(self.connection, self.client.multi_user)

    def _remote_run(self, run: "V2beta1Run") -> RunInfo:
        spec = runs.spec_of(self.client, run)
        parameters = defaults_of(graph_of(spec).get("root", {})) | runs.parameters_of(run)
        root = run.runtime_config and run.runtime_config.pipeline_root
        nodes: list[Object] = []
        with contextlib.suppress(KfpDdpError):
            nodes = list_nodes(self.api(), run.run_id)
        return RunInfo(
            id=run.run_id,
            name=run.display_name,
            state=run.state or "PENDING",
            start=runs.started(run),
            end=runs.ended(run),
            steps=steps_of(run, spec, nodes),
            files=lambda: self._files(run, parameters, spec),
            parameters=parameters,
            page=self.connection.run_page(run.run_id),
            pipeline=str(graph_of(spec).get("pipelineInfo", {}).get("name", "")),
            root=str(root or config().pipeline_root).rstrip("/"),
            cancelled=runs.is_cancelled(run),
            error=(run.error and run.error.message) or "",
        )

    def _files(
        self, run: "V2beta1Run", parameters: Mapping[str, Any], spec: Mapping[str, Any] | None
    ) -> RunFiles:
        work, claim = parameters.get("work"), parameters.get("work_claim")
        if isinstance(work, str) and is_remote(work):
            return StoredFiles(f"{work.rstrip('/')}/{run.run_id}")
        if not isinstance(claim, str) or not claim:
            raise InputError(
                f"the location of the files of {run.display_name} is not known: its pipeline has "
                "no parameter work or work_claim"
            )
        if claim not in self._claims:
            job = parameters.get("job")
            user = job.get("run_as_user") if isinstance(job, dict) else None
            reader = open_claim(
                self.api(), claim, _image(spec), run.service_account or "", user or USER
            )
            self._claims[claim] = self._stack.enter_context(reader)
        return self._claims[claim](run.run_id)


@contextlib.contextmanager
def run_finder(connection: Connection) -> Iterator[RunFinder]:
    """Yield a finder of runs, and close its connections on exit."""
    with contextlib.ExitStack() as stack:
        yield RunFinder(connection, stack)


def local_run(folder: Path) -> RunInfo:
    """Return the run whose output a folder contains.

    Raises:
        InputError: it contains none.
    """
    try:
        text = (folder / LOG).read_text(errors="replace")
        end = datetime.fromtimestamp((folder / LOG).stat().st_mtime, UTC)
    except OSError:
        raise InputError(
            f"{folder} contains no run: name one of run --local, such as run-output/latest"
        ) from None
    states: dict[str, str] = {}
    for line in text.splitlines():
        if started := STARTED.search(line):
            states[started[1]] = "RUNNING"
        elif ended := ENDED.search(line):
            states[ended[1]] = LOCAL_STATES.get(ended[2], ended[2])
    finished = FINISHED.findall(text)[-1:]
    state = LOCAL_STATES.get(finished[0], finished[0]) if finished else "UNFINISHED"
    if state == "UNFINISHED" and is_running(folder):
        state = "RUNNING"
    if "FAILED" in states.values():
        state = "FAILED"
    run_id = max((path.name for path in (folder / "work").glob("[!.]*")), default="")
    return RunInfo(
        id=run_id,
        name=folder.resolve().name,
        state=state,
        start=_local_start(folder),
        end=None if state in ("RUNNING", "UNFINISHED") else end,
        steps=tuple(
            Step(name, name, state if one == "RUNNING" else one) for name, one in states.items()
        ),
        files=lambda: StoredFiles(str(folder / "work" / run_id)),
        folder=folder,
    )


def _local_start(folder: Path) -> datetime | None:
    """Return when a local run started, from the name of its folder of artifacts."""
    matches = [ARTIFACTS_TIME.search(path.name) for path in (folder / "artifacts").glob("*")]
    stamps = sorted(match[0] for match in matches if match)
    return datetime.strptime(stamps[-1], "%Y-%m-%d-%H-%M-%S-%f").astimezone() if stamps else None


def _image(spec: Mapping[str, Any] | None) -> str:
    """Return a launcher image that the run has pulled, else the configured one."""
    executors = graph_of(spec).get("deploymentSpec", {}).get("executors", {})
    images = [str(one.get("container", {}).get("image", "")) for one in executors.values()]
    launchers = sorted(image for image in images if "launcher" in image.rpartition("/")[2])
    if launchers:
        return launchers[0]
    from kfp_ddp import __version__

    settings = config()
    return settings.launcher_image or f"{settings.registry}/launcher:{__version__}"
