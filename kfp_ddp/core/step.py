"""What every engine's entry point has in common when it runs as a step of a pipeline."""

import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from kfp_ddp.core.errors import InputError, KfpDdpError

P = ParamSpec("P")
R = TypeVar("R")

KEY = "/var/run/secrets/kfp-ddp/key.json"
"""Where pipelines mount the service account's key of a bucket, if there is one."""
NETRC = "/var/run/secrets/kfp-ddp/netrc"
"""The same with the logins at web servers, a key of the same secret."""

KEY_NAME = r"^$|^[A-Za-z0-9_][A-Za-z0-9._-]{0,252}$"
"""Pattern of the name of a key in the bucket's secret; empty for none."""
KEY_NAME_MEANING = "the name of a key of the bucket's secret, not what the secret holds"

HIDDEN = "(not recorded)"

EXCEPTION = re.compile(r"[\w.]+(Error|Exception): ")


def step(run: Callable[P, R]) -> Callable[P, R]:
    """Make a `KfpDdpError` end the step with its one line instead of a traceback.

    Raises:
        SystemExit: with the line, so that the process exits with 1.
    """

    @functools.wraps(run)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        adopt_secrets()
        try:
            return run(*args, **kwargs)
        except KfpDdpError as error:
            raise SystemExit(f"error: {error}") from error

    return wrapper


def adopt_secrets() -> None:
    """Use what is mounted, unless credentials were named otherwise."""
    for name, path in (("GOOGLE_APPLICATION_CREDENTIALS", KEY), ("NETRC", NETRC)):
        if os.path.exists(path):
            os.environ.setdefault(name, path)


def secret(key: str) -> str:
    """What a key of the bucket's secret holds: the mounted file, else the variable of this name.

    Args:
        key: A plain name.

    Returns:
        The text without white space around it; '' where there is no such key.
    """
    try:
        return (Path(KEY).parent / key).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return os.environ.get(key, "").strip()


def needed_secret(key: str, setting: str) -> str:
    """The same of a key that has to be there.

    Args:
        key: A plain name.
        setting: What names it.

    Raises:
        InputError: it is not.
    """
    content = secret(key)
    if not content:
        raise InputError(
            f"{setting} names the key {key}, which the bucket's secret (bucket_secret) does not "
            f"hold: add it, as by kubectl create secret generic … --from-file={key}=…"
        )
    return content


def last_error(log: str) -> str:
    """What a failed step said of it in its log: its `error:` line, else its exception, else ''."""
    lines = [line.strip() for line in log.splitlines()]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    raised = [line for line in lines if EXCEPTION.match(line)]
    return next(iter(said[-1:] + raised[:1]), "")


def write_job(artifact: Any, job: dict[str, Any]) -> None:
    """Write the job as it ended to an output artifact.

    Without the server's bookkeeping, and without the values of variables: who may read artifacts
    is not who may read the job.
    """
    found = {key: _without_values(value) for key, value in job.items() if key != "metadata"}
    if "metadata" in job:
        found["metadata"] = {k: v for k, v in job["metadata"].items() if k != "managedFields"}
    path = Path(artifact.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")


def _without_values(tree: Any) -> Any:
    """A part of a job in which each variable of a container has its name alone."""
    if isinstance(tree, list):
        return [_without_values(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    found = {key: _without_values(value) for key, value in tree.items()}
    if isinstance(tree.get("env"), list):
        hidden = {"value": HIDDEN}
        found["env"] = [each | hidden if "value" in each else each for each in tree["env"]]
    return found
