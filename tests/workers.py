"""A worker of a job as a process of this machine: its files, its variables and its command.

Kubernetes expands what stands in a pod, and its node lays the map's files where they are mounted.
"""

import base64
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from kfp import dsl

from kfp_ddp.jobs import engine
from kfp_ddp.jobs.identity import identify
from kfp_ddp.jobs.jobs import script_map
from kfp_ddp.jobs.kinds import pod
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.shipping import payload


def specification(inputs: dict[str, Any], kind: str = "tfjob") -> LaunchSpec:
    """The job of some inputs, as the component makes it."""
    return engine.specification({}, dsl.TaskConfig(), **{"image": "a:1", "kind": kind, **inputs})


def run(
    spec: LaunchSpec, place: Path, by_map: bool = True, **more: str
) -> subprocess.CompletedProcess[bytes]:
    """Run what one worker of a job runs, with a new folder `place` as its file system."""
    process = start(spec, place, by_map, **more)
    out, error = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def start(
    spec: LaunchSpec, place: Path, by_map: bool = True, **more: str
) -> "subprocess.Popen[bytes]":
    """The same, not waited for."""
    starter = spec.job_kind.script_starter
    (place / "tmp").mkdir(parents=True)
    (place / "cwd").mkdir()
    mounted = place / "mounted"
    mounted.mkdir()
    name = ""
    if by_map:
        created = script_map(spec, identify("run", "train", "", spec), None)
        name = created["metadata"]["name"]
        for file, text in created.get("data", {}).items():
            (mounted / file).write_bytes(text.encode())
        for file, packed in created.get("binaryData", {}).items():
            (mounted / file).write_bytes(base64.b64decode(packed))
    variables: dict[str, str] = {}
    for item in pod.environment(spec, name, starter):  # each may name those before it
        variables[item["name"]] = expanded(item.get("value", ""), variables)
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(place / "tmp"), "HOME": str(place)}
    env |= {key: value.replace(payload.FOLDER, str(mounted)) for key, value in variables.items()}
    words = [
        expanded(w, variables)
        for w in (*pod.command(spec, name, starter), *pod.args(spec, starter))
    ]
    command = [word.replace(payload.FOLDER, str(mounted)) for word in words]
    command = [sys.executable if word == "python3" else word for word in command]
    return subprocess.Popen(
        command,
        env={**env, **more},
        cwd=place / "cwd",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def expanded(text: str, variables: dict[str, str]) -> str:
    """A word as Kubernetes hands it to a container."""

    def one(result: re.Match[str]) -> str:
        return "$" if result[0] == "$$" else variables.get(result[1], result[0])

    return re.sub(r"\$\$|\$\(([^()]*)\)", one, text)
