"""A run that is looked into: what is known of it, and where its files are."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_ddp.client import runs
from kfp_ddp.client.connection import open_client
from kfp_ddp.client.inspection import local_run
from kfp_ddp.client.pipelines import graph_of
from kfp_ddp.client.progress import api_of
from kfp_ddp.client.run_files import PlacedFiles, RunFiles, on_a_claim
from kfp_ddp.client.steps import Step, every_step, steps_of
from kfp_ddp.core.config import Connection, config
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.folders import is_remote
from kfp_ddp.k8s.api import Api
from kfp_ddp.pipelines.document import defaults_of

if TYPE_CHECKING:
    import kfp
    from kfp_server_api import V2beta1Run

Reader = Callable[[str], RunFiles]


@dataclass(frozen=True)
class Subject:
    """A run on KFP, or one of this machine."""

    id: str
    name: str
    state: str
    """As KFP says it, such as FAILED; UNFINISHED for a run here that did not come to its end."""
    start: datetime | None
    end: datetime | None
    steps: tuple[Step, ...]
    files: Callable[[], RunFiles]
    """Opens its files; raises KfpDdpError where they cannot be had."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """What it was given."""
    folder: Path | None = None
    """That of `run --local`; None for a run on KFP."""
    page: str = ""
    """Its address in the UI."""
    pipeline: str = ""
    """The pipeline's name, as its artifacts are kept under."""
    root: str = ""
    """Where KFP keeps them; '' where that is not known."""
    cancelled: bool = False
    """Whether somebody ended it."""
    error: str = ""
    """What the server says of its end."""

    @property
    def word(self) -> str:
        """What a person types to name it."""
        return str(self.folder) if self.folder else self.id[:8]

    def step(self, name: str) -> Step:
        """A step by its name, or its title.

        Raises:
            InputError: there is none, with what there is.
        """
        found = every_step(self.steps)
        for each in found:
            if name in (each.name, each.title):
                return each
        there = ", ".join(each.name for each in found if not each.steps)
        raise InputError(f"{self.name} has no step {name!r}: it has {there or 'none yet'}")


class Subjects:
    """Finds runs; the server is asked, and pods are started, only where that is needed."""

    def __init__(self, connection: Connection, stack: contextlib.ExitStack) -> None:
        self.connection, self._stack = connection, stack
        self._client: kfp.Client | None = None
        self._readers: dict[str, Reader] = {}

    def find(self, word: str) -> Subject:
        """The run of a folder here, else the one of the server; `find_run` tells the words.

        Raises:
            KfpDdpError: there is none, or the server does not answer.
        """
        if Path(word).is_dir():
            return self._here(Path(word))
        if os.sep in word:
            raise InputError(f"there is no folder {word}: give one of run --local, or a run's id")
        return self._there(runs.find_run(self.client, word))

    @property
    def client(self) -> "kfp.Client":
        """That of the server."""
        if self._client is None:
            self._client = self._stack.enter_context(open_client(self.connection))
        return self._client

    def api(self) -> Api:
        """The cluster's API, in the namespace of the runs.

        Raises:
            InputError: no cluster is configured.
        """
        return api_of(self.connection)

    def _here(self, folder: Path) -> Subject:
        found = local_run.read(folder)
        return Subject(
            id=found.id,
            name=folder.name or str(folder),
            state=found.state,
            start=found.start,
            end=found.end,
            steps=found.steps,
            files=lambda: PlacedFiles(str(folder / "work" / found.id)),
            folder=folder,
        )

    def _there(self, run: "V2beta1Run") -> Subject:
        spec = runs.spec_of(self.client, run)
        parameters = defaults_of(graph_of(spec).get("root", {})) | runs.parameters_of(run)
        return Subject(
            id=run.run_id,
            name=run.display_name,
            state=run.state or "PENDING",
            start=runs.started(run),
            end=runs.ended(run),
            steps=steps_of(run, spec),
            files=lambda: self._files(run, parameters, spec),
            parameters=parameters,
            page=self.connection.run_page(run.run_id),
            pipeline=str(graph_of(spec).get("pipelineInfo", {}).get("name", "")),
            root=_root(run).rstrip("/"),
            cancelled=any(each.state == "CANCELING" for each in run.state_history or []),
            error=(run.error and run.error.message) or "",
        )

    def _files(
        self, run: "V2beta1Run", parameters: Mapping[str, Any], spec: Mapping[str, Any] | None
    ) -> RunFiles:
        work, claim = parameters.get("work"), parameters.get("work_claim")
        if isinstance(work, str) and is_remote(work):
            return PlacedFiles(f"{work.rstrip('/')}/{run.run_id}")
        if not isinstance(claim, str) or not claim:
            raise InputError(
                f"where {run.display_name} left its files is not known: its pipeline has no "
                "parameter work or work_claim"
            )
        if claim not in self._readers:
            job = parameters.get("job")
            user = job.get("run_as_user") if isinstance(job, dict) else None
            reader = on_a_claim(
                self.api(), claim, _image(spec), run.service_account or "", user or 1000
            )
            self._readers[claim] = self._stack.enter_context(reader)
        return self._readers[claim](run.run_id)


@contextlib.contextmanager
def subjects(connection: Connection) -> Iterator[Subjects]:
    """To find runs with; what was opened for them is closed when the block is left."""
    with contextlib.ExitStack() as stack:
        yield Subjects(connection, stack)


def _root(run: "V2beta1Run") -> str:
    given = run.runtime_config and run.runtime_config.pipeline_root
    return str(given or config().pipeline_root)


def _image(spec: Mapping[str, Any] | None) -> str:
    """An image of ours that the run pulled already, else the one that is set."""
    executors = graph_of(spec).get("deploymentSpec", {}).get("executors", {})
    images = [str(each.get("container", {}).get("image", "")) for each in executors.values()]
    ours = sorted(image for image in images if "launcher" in image.rpartition("/")[2])
    if ours:
        return ours[0]
    from kfp_ddp import __version__

    settings = config()
    return settings.launcher_image or f"{settings.registry}/launcher:{__version__}"
