"""The files of a run as far as KFP has them: the log of its steps, and its artifacts."""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kfp_ddp.client import models
from kfp_ddp.client.kfp.pods import LAUNCHER, KfpLogs
from kfp_ddp.client.kfp.steps import Leaf
from kfp_ddp.client.run.run_files import RunFiles, StoredFiles
from kfp_ddp.core.errors import KfpDdpError, StorageError, writing
from kfp_ddp.core.files import atomic_write
from kfp_ddp.core.run_folder import REPORT, RUN_ID, VERDICT, RunFolder
from kfp_ddp.core.settings import mapping_in
from kfp_ddp.models import bundle
from kfp_ddp.models.evaluation import FILE
from kfp_ddp.runs import trials
from kfp_ddp.storage.kinds import open_store

if TYPE_CHECKING:
    from kfp_ddp.client.kfp.compat import Client

LOSS_CURVE = "loss_curve.html"
Reader = Callable[[], bytes | None]
"""Returns a file; None if it does not exist."""
GET = "/artifacts/get"
"""Path of artifacts on the server of KFP's UI."""
OUTPUT = "ExecutorOutput: "
"""Start of a step's output in the log of the launcher."""
LARGEST = 128 << 20
"""Bytes of a file that is read."""
MISSING = ("NoSuchKey", "does not exist", "(404")
"""Words in the server's errors for an artifact that was deleted."""
ARTIFACTS = {
    "train_metrics": RunFolder.METRICS,
    "trained_model": RunFolder.CONFIG,
    "loss_curve": LOSS_CURVE,
    "gate_report": REPORT,  # better than that before the gate
    "evaluation_report": REPORT,
    "evaluation_metrics": FILE,
}
"""The file, in the folder of a training or an evaluation, that an artifact is a copy of."""


@dataclass
class KfpFiles:
    """The files of a run as they are in its folder, as far as KFP has them."""

    files: Mapping[str, Sequence[Reader]]
    """The readers of each file, the best first."""
    uploaded: RunFiles | None
    where: str
    note: str

    def sizes(self) -> dict[str, int]:
        """Return the size of each file, 0 for artifacts; see `RunFiles`."""
        sizes = dict.fromkeys(self.files, 0)
        if self.uploaded:
            sizes |= self.uploaded.sizes()
        return sizes

    def fetch(self, names: Iterable[str], folder: Path) -> None:
        """Copy files to a folder; StorageError if none of them exists any more."""
        requested = set(names)
        if self.uploaded:
            self.uploaded.fetch(requested - self.files.keys(), folder)
        missing = requested & self.files.keys()
        for name in sorted(missing):
            content = self._read(name)
            if content is not None:
                missing.remove(name)
                _write(folder / name, content)
        # A verdict is in the log itself, so it does not show that artifacts can be read.
        verdicts = {name for name in requested if name.endswith(f"/{VERDICT}")}
        if missing and requested <= missing | verdicts:
            raise StorageError(
                f"{self.where} has no files (any more): is --host the address of KFP's UI, as in "
                "the browser?"
            )
        lacks = f" (lacks {', '.join(sorted(missing))})" if missing else ""
        self.note = self.note.partition(" (lacks")[0] + lacks

    def _read(self, name: str) -> bytes | None:
        """Return a file from the best reader that has it; None if it does not exist."""
        for read in self.files[name]:
            if (content := read()) is not None:
                return content
        return None


def _write(path: Path, content: bytes) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(content)


def kfp_files(
    client: "Client", run_id: str, leaves: Iterable[Leaf], values: Mapping[str, Any], note: str
) -> KfpFiles:
    """Return the files of a run that can be read without its folder; `note` says why."""
    logs = KfpLogs(client, run_id)
    files: dict[str, list[Reader]] = {}
    for leaf in leaves:
        if leaf.step.state not in ("SUCCEEDED", "UNKNOWN"):
            continue
        for output in outputs(logs.lines(leaf)):
            # What does not have the form of KFP is no output.
            with contextlib.suppress(KeyError, IndexError, TypeError, AttributeError):
                _add(output, files, client)
    tasks = {name.partition("/")[0] for name in files}
    task = tasks.pop() if len(tasks) == 1 else "uploaded"
    uploaded = find_uploaded(run_id, values, task)
    if uploaded:
        _add_uploaded(uploaded.where, task, files)
    return KfpFiles(files, uploaded, f"run {run_id} in KFP", note)


def _add_uploaded(uri: str, task: str, files: dict[str, list[Reader]]) -> None:
    """Add the files of a run that an uploaded bundle has, too, as the last readers."""
    evaluation = f"{task}/{RunFolder.evaluation_name('val')}"
    readers = {
        f"{evaluation}/{FILE}": _stored(uri, bundle.METRICS),
        f"{evaluation}/{REPORT}": _stored(uri, REPORT),
        f"{evaluation}/{VERDICT}": _stored(uri, VERDICT),
        f"{task}/{RunFolder.CONFIG}": _part(_stored(uri, bundle.CONFIG), "training"),
    }
    for name, reader in readers.items():
        files.setdefault(name, []).append(reader)


def find_uploaded(
    run_id: str, parameters: Mapping[str, Any], task: str = "uploaded"
) -> RunFiles | None:
    """Return the bundle that a run exported to its destination, as files of a task."""
    destination = parameters.get("destination")
    name = parameters.get("model_name")
    if not destination or not name:
        return None
    try:
        versions = models.Model(open_store(str(destination)), str(name)).versions()
    except KfpDdpError:
        return None
    for version in versions:
        if version.run_id == run_id and not version.damaged:
            return StoredFiles(version.uri, f"{task}/{RunFolder.BUNDLE}/")
    return None


def _add(output: Mapping[str, Any], files: dict[str, list[Reader]], client: "Client") -> None:
    """Add the files of one step, by the folder of the run that it returned."""
    parameters = output.get("parameterValues") or {}
    artifacts = {name: values["artifacts"][0] for name, values in output["artifacts"].items()}
    if "gate_verdict" in artifacts:
        folders = [name.rpartition("/")[0] for name in files if name.endswith(f"/{FILE}")]
        # A gate does not name its evaluation.
        folder = folders[0] if len(folders) == 1 else ""
    elif "run_dir" in parameters:
        folder = parameters["run_dir"].rstrip("/").rpartition("/")[2]
    else:
        folder = "/".join(parameters["evaluation"].split("/")[-3:-1])
    if not all(RUN_ID.fullmatch(part) for part in folder.split("/")):
        return
    if "sweep_report" in artifacts:
        ranked = json.dumps(artifacts["sweep_report"]["metadata"].get("sweep")).encode()
        files[f"{folder}/{trials.FILE}"] = [lambda: ranked]
    for name in ARTIFACTS.keys() & artifacts.keys():
        read = _artifact(client, artifacts[name]["uri"])
        if name == "trained_model":
            read = _part(read, "settings")
        files.setdefault(f"{folder}/{ARTIFACTS[name]}", []).insert(0, read)
    if "gate_verdict" in artifacts:
        verdict = json.dumps(artifacts["gate_verdict"]["metadata"]).encode()
        files[f"{folder}/{VERDICT}"] = [lambda: verdict]


def outputs(lines: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    """Yield what the launcher logged as a step's output; nothing if the log cannot be read."""
    rest: list[str] = []
    try:
        for line in lines:
            if OUTPUT in line and LAUNCHER.match(line):
                rest = [line.partition(OUTPUT)[2]]
            elif rest:
                rest.append(line)
            if line == "}" and rest:
                yield mapping_in("\n".join(rest))
            if line == "}" or len(rest) > 100_000:
                rest = []
    except StorageError:
        return


def _artifact(client: "Client", uri: str) -> Reader:
    """Return a reader of an artifact from the server of KFP's UI."""

    def read() -> bytes | None:
        parts = urlsplit(uri)
        content = bytearray()
        query = {"bucket": parts.netloc, "key": parts.path.lstrip("/")}
        query["source"] = "gcs" if parts.scheme == "gs" else parts.scheme
        if namespace := client.get_user_namespace():
            query["namespace"] = namespace
        try:
            for block in client.blocks(GET, query):
                content += block
                if len(content) > LARGEST:
                    raise StorageError(f"{uri} is larger than {LARGEST >> 20} MiB")
        except KfpDdpError as error:
            if any(word in str(error) for word in MISSING):
                return None
            raise
        return bytes(content)

    return read


def _stored(uri: str, name: str) -> Reader:
    return lambda: open_store(uri).read(name, LARGEST)


def _part(read: Reader, key: str) -> Reader:
    """Return a reader of one field of a JSON file."""

    def part() -> bytes | None:
        content = mapping_in(read()).get(key)
        return json.dumps(content).encode() if isinstance(content, dict) else None

    return part
