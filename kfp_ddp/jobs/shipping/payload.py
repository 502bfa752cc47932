"""Script, code and packages sent to the workers, by ConfigMap, environment or PVC."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from kfp_ddp.core.container_images import lock_of
from kfp_ddp.core.errors import InputError, writing
from kfp_ddp.core.files import atomic_write
from kfp_ddp.core.packed import ARCHIVE, pack, unpack
from kfp_ddp.core.text import unexpanded
from kfp_ddp.jobs.fields import JobFields
from kfp_ddp.jobs.shipping import code
from kfp_ddp.jobs.task import mount_of
from kfp_ddp.storage.kinds import open_store

Job = TypeVar("Job", bound=JobFields)
FOLDER = "/etc/kfp-ddp"
SCRIPT = "script.py"
START = "start.py"
PACKAGES = "requirements.txt"
CODE = "code.tar.gz"
UV = "uv.lock"
PROGRAM = Path(__file__).with_name("worker_start.py")
VARIABLES = {
    SCRIPT: "KFP_DDP_SCRIPT",
    START: "KFP_DDP_START",
    PACKAGES: "KFP_DDP_PACKAGES",
    UV: "KFP_DDP_UV",
    CODE: "KFP_DDP_CODE",
}
PROGRAMS = (SCRIPT, START)
# Bytes, since the text may begin with a byte order mark.
RUN_FROM_ENV = (
    "import os, sys; exec(compile(os.environb[b'{variable}'], '{file}', 'exec', dont_inherit=True))"
)
# Limits: 128 KiB for a variable in Linux, 1 MiB for a ConfigMap.
VARIABLE_BYTES = 130_000
MAP_BYTES = 1_000_000


def files(spec: JobFields) -> dict[str, bytes]:
    """Return the files that a job gives to its workers, by name."""
    content = {}
    if spec.script:
        content[SCRIPT] = spec.script.encode()
    if spec.prepares():
        content[START] = PROGRAM.read_bytes()
    if spec.packages_to_install:
        content[PACKAGES] = "".join(f"{pin}\n" for pin in spec.packages_to_install).encode()
        content[UV] = lock_of("uv").read_bytes()
    if spec.code.startswith(ARCHIVE):
        content[CODE] = unpack(spec.code, "code", ARCHIVE)
    return content


def variables(spec: JobFields, script_map: str) -> dict[str, str]:
    """Return the workers' variables: paths of the files in the ConfigMap, or their contents."""
    env: dict[str, str] = {}
    content_of = files(spec)
    for name, content in content_of.items():
        if not script_map:
            env[VARIABLES[name]] = unexpanded(_as_variable(name, content))
        elif name not in PROGRAMS:
            env[f"{VARIABLES[name]}_FILE"] = f"{FOLDER}/{name}"
    if CODE in content_of:
        env["KFP_DDP_CODE_SHA256"] = code.digest_of(content_of[CODE])
    elif spec.code:
        env["KFP_DDP_CODE_SHA256"] = code.digest_in(spec.code)
        env[f"{VARIABLES[CODE]}_FILE"] = spec.code
    if spec.pip_index_urls:
        env["KFP_DDP_PIP_INDEX_URLS"] = unexpanded(" ".join(spec.pip_index_urls))
    return env


def python(name: str, script_map: str) -> list[str]:
    """Return the command that runs one of the files with Python."""
    if script_map:
        return ["python3", f"{FOLDER}/{name}"]
    return ["python3", "-c", RUN_FROM_ENV.format(variable=VARIABLES[name], file=name)]


def map_data(spec: JobFields) -> dict[str, Mapping[str, str]]:
    """Return the data of the ConfigMap with the files; InputError if they are too large."""
    content_of = files(spec)
    size = sum(map(len, content_of.values()))
    if size > MAP_BYTES:
        raise InputError(
            f"script, code and packages have {size:,} bytes, and a ConfigMap {MAP_BYTES:,}: "
            "put the code into a bucket or on a PVC, as as_folder does with upload"
        )
    data: dict[str, Mapping[str, str]] = {
        "data": {name: content.decode() for name, content in content_of.items() if name != CODE}
    }
    if CODE in content_of:
        data["binaryData"] = {CODE: base64.b64encode(content_of[CODE]).decode()}
    return data


def fits_variables(spec: JobFields) -> bool:
    """Return whether the files fit into variables."""
    return all(len(_as_variable(*item).encode()) <= VARIABLE_BYTES for item in files(spec).items())


def _as_variable(name: str, content: bytes) -> str:
    """Return a file as the value of a variable, base64 unless it is a program."""
    return content.decode() if name in PROGRAMS else base64.b64encode(content).decode()


RESERVED_BYTES = 200_000
"""Bytes of a ConfigMap reserved for the script and the packages."""


def bring(spec: Job, run_dir: Path | None) -> Job:
    """Return the job with its code checked, and placed where its workers can read it.

    Code in a bucket is copied to a ConfigMap or, if too large, to the work PVC.
    """
    if not spec.code:
        return spec
    if spec.code.startswith(ARCHIVE):
        code.check(unpack(spec.code, "code", ARCHIVE), spec.entry)
        return spec
    if spec.code.startswith("/"):
        _check_mounted(spec, spec.code)
        if os.path.exists(spec.code):  # the PVC may be mounted only in the workers
            _fetch(spec)
        return spec
    archive = _fetch(spec)
    if len(archive) <= MAP_BYTES - RESERVED_BYTES:
        return spec.model_copy(update={"code": pack(archive, ARCHIVE)})
    if run_dir is None:
        raise InputError(
            f"the code has {len(archive):,} bytes packed, too many for a ConfigMap: mount a "
            "PVC on the task and set work_dir to a folder on it"
        )
    file = run_dir / "code" / Path(spec.code).name
    _check_mounted(spec, str(file))
    with writing(file):
        file.parent.mkdir(exist_ok=True)
        with atomic_write(file) as into:
            into.write(archive)
        file.chmod(0o644)
    return spec.model_copy(update={"code": str(file)})


def _fetch(spec: JobFields) -> bytes:
    """Return the archive, with its digest and content verified."""
    folder, _, name = spec.code.rpartition("/")
    archive = open_store(folder or "/").read(name, code.MOST_PACKED)
    if archive is None:
        raise InputError(f"code={spec.code} not found: upload it with as_folder")
    digest = code.digest_of(archive)
    if digest != code.digest_in(spec.code):
        raise InputError(
            f"code={spec.code} has SHA-256 {digest[:12]}..., not the one of its name: upload it "
            "again"
        )
    code.check(archive, spec.entry)
    return archive


def _check_mounted(spec: JobFields, path: str) -> None:
    mounts = [str(item["mountPath"]) for item in spec.volume_mounts] + list(spec.claims)
    if not mount_of(path, mounts):
        raise InputError(
            f"code {path} is not on a PVC that the workers mount; mount one on the task with "
            "kubernetes.mount_pvc"
        )
