"""Common parts of all steps: errors, secrets and the job artifact."""

import contextlib
import functools
import json
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from kfp_ddp.core.errors import InputError, KfpDdpError

P = ParamSpec("P")
R = TypeVar("R")

SECRET = "/var/run/secrets/kfp-ddp"  # noqa: S105
"""Folder where pipelines mount the bucket's secret, a file for each key."""
CREDENTIALS = {"key.json": "GOOGLE_APPLICATION_CREDENTIALS", "netrc": "NETRC"}
"""Environment variable that names a file of the secret."""
VARIABLE = re.compile(r"(AWS|AZURE|HF|MLFLOW)_[A-Z0-9_]+")
"""Keys of the secret that are environment variables themselves."""

KEY_NAME = r"^$|^[A-Za-z0-9_][A-Za-z0-9._-]{0,252}$"
"""Pattern of the name of a key in the bucket's secret; empty for none."""
KEY_NAME_MEANING = "the name of a key of the bucket's secret, not its content"

HIDDEN = "(not recorded)"

EXCEPTION = re.compile(r"[\w.]+(Error|Exception): ")


class Artifact(Protocol):
    """What is used of a KFP output artifact."""

    path: str
    metadata: dict[str, Any]


def step(run: Callable[P, R]) -> Callable[P, R]:
    """Make a `KfpDdpError` end the step with its message: SystemExit, so exit code 1."""

    @functools.wraps(run)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        adopt_secrets()
        try:
            return run(*args, **kwargs)
        except KfpDdpError as error:
            raise SystemExit(f"error: {error}") from error

    return wrapper


@contextlib.contextmanager
def handling_signals(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Call `handler` for these signals during a `with` block of the main thread."""
    before = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in before:
            signal.signal(number, earlier)


def adopt_secrets() -> None:
    """Use mounted credentials, unless the environment has others."""
    # At this level libraries log the headers of requests, and each user of KFP can read the logs.
    logging.disable(logging.DEBUG)
    with contextlib.suppress(OSError):
        for path in Path(SECRET).iterdir():
            if path.name in CREDENTIALS:
                os.environ.setdefault(CREDENTIALS[path.name], str(path))
            elif VARIABLE.fullmatch(path.name) and (content := secret(path.name)):
                os.environ.setdefault(path.name, content)


def secret(key: str) -> str:
    """Return a key of the bucket's secret, from a mounted file or a variable; '' if missing."""
    with contextlib.suppress(OSError, ValueError):
        return Path(SECRET, key).read_text(encoding="utf-8").strip()
    return os.environ.get(key, "").strip()


def needed_secret(key: str, setting: str) -> str:
    """Return a key of the bucket's secret, which `setting` names; raise InputError if missing."""
    content = secret(key)
    if not content:
        raise InputError(
            f"{setting} names the key {key}, which the bucket's secret (bucket_secret) does not "
            f"have: add it, as by kubectl create secret generic … --from-file={key}=…"
        )
    return content


def last_error(log: str) -> str:
    """Return the error in a failed step's log: its `error:` line, else its exception, else ''."""
    lines = list(map(str.strip, log.splitlines()))
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    raised = [line for line in lines if EXCEPTION.match(line)]
    # The step's own line is its last word; of exceptions, the first caused the others.
    return next(iter(errors[-1:] + raised[:1]), "")


def write_job(artifact: Artifact, job: dict[str, Any]) -> None:
    """Write a finished job to an artifact, which more users may read, without its environment."""
    result = _without_values(job)
    if "metadata" in job:
        metadata = job["metadata"].items()
        result["metadata"] = {name: value for name, value in metadata if name != "managedFields"}
    write_artifact(artifact, json.dumps(result, indent=2, sort_keys=True) + "\n")


def write_artifact(artifact: Artifact, text: str, /, **metadata: Any) -> None:
    """Write the file of an artifact, and add to its metadata."""
    artifact.metadata.update(metadata)
    path = Path(artifact.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _without_values(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_without_values(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    result = {key: _without_values(value) for key, value in tree.items()}
    if isinstance(tree.get("env"), list):
        hidden = {"value": HIDDEN}
        result["env"] = [item | hidden if "value" in item else item for item in tree["env"]]
    return result
