"""Script, code and packages on their way to the workers, by ConfigMap, environment or PVC."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kfp_ddp.core.errors import InputError, StorageError, full
from kfp_ddp.core.files import atomic_write
from kfp_ddp.jobs import code
from kfp_ddp.jobs.script import unexpanded
from kfp_ddp.jobs.task import covering
from kfp_ddp.storage.destination import open_destination

if TYPE_CHECKING:
    from kfp_ddp.jobs.launch_spec import LaunchSpec

FOLDER = "/etc/kfp-ddp"
SCRIPT, START, PACKAGES, CODE = "script.py", "start.py", "requirements.txt", "code.tar.gz"
PROGRAM = Path(__file__).with_name("worker_start.py")
VARIABLES = {
    SCRIPT: "KFP_DDP_SCRIPT",
    START: "KFP_DDP_START",
    PACKAGES: "KFP_DDP_PACKAGES",
    CODE: "KFP_DDP_CODE",
}
AS_TEXT = (SCRIPT, START)
# As bytes, which may begin with a byte order mark.
RUN_FROM_ENV = (
    "import os, sys; exec(compile(os.environb[b'{variable}'], '{file}', 'exec', dont_inherit=True))"
)
# Linux takes variables of 128 KiB each; a ConfigMap holds 1 MiB.
VARIABLE_BYTES, MAP_BYTES = 130_000, 1_000_000


def files(spec: LaunchSpec) -> dict[str, bytes]:
    """The files that travel with a job, by name."""
    found = {}
    if spec.script:
        found[SCRIPT] = spec.script.encode()
    if spec.prepares():
        found[START] = PROGRAM.read_bytes()
    if spec.packages_to_install:
        found[PACKAGES] = "".join(f"{pin}\n" for pin in spec.packages_to_install).encode()
    if spec.code.startswith(code.PREFIX):
        found[CODE] = code.from_data_url(spec.code)
    return found


def variables(spec: LaunchSpec, script_map: str) -> dict[str, str]:
    """What workers are told of the files: where each lies in the map, or all of it without one."""
    found, carried = {}, files(spec)
    if not script_map:
        for name, content in carried.items():
            found[VARIABLES[name]] = unexpanded(_in_a_variable(name, content))
    elif PACKAGES in carried:
        found[f"{VARIABLES[PACKAGES]}_FILE"] = f"{FOLDER}/{PACKAGES}"
    if spec.code:
        packed = carried.get(CODE)
        found["KFP_DDP_CODE_SHA256"] = (
            code.digest_of(packed) if packed else code.digest_in(spec.code)
        )
        if script_map or not packed:
            found[f"{VARIABLES[CODE]}_FILE"] = f"{FOLDER}/{CODE}" if packed else spec.code
    if spec.pip_index_urls:
        found["KFP_DDP_PIP_INDEX_URLS"] = unexpanded(" ".join(spec.pip_index_urls))
    return found


def python(name: str, script_map: str) -> list[str]:
    """The command that runs one of the files with Python."""
    if script_map:
        return ["python3", f"{FOLDER}/{name}"]
    return ["python3", "-c", RUN_FROM_ENV.format(variable=VARIABLES[name], file=name)]


def map_data(spec: LaunchSpec) -> dict[str, Mapping[str, str]]:
    """The data of the ConfigMap that brings the files.

    Raises:
        InputError: more than one holds.
    """
    carried = files(spec)
    size = sum(map(len, carried.values()))
    if size > MAP_BYTES:
        raise InputError(
            f"script, code and packages have {size:,} bytes, and a ConfigMap holds {MAP_BYTES:,}: "
            "put the code into a bucket or on a claim, as as_folder does with upload"
        )
    data: dict[str, Mapping[str, str]] = {
        "data": {name: content.decode() for name, content in carried.items() if name != CODE}
    }
    if CODE in carried:
        data["binaryData"] = {CODE: base64.b64encode(carried[CODE]).decode()}
    return data


def fits_variables(spec: LaunchSpec) -> bool:
    """Whether the files can travel without a ConfigMap."""
    return all(
        len(_in_a_variable(*each).encode()) <= VARIABLE_BYTES for each in files(spec).items()
    )


def _in_a_variable(name: str, content: bytes) -> str:
    """A file as the value of a variable; what Python runs from there is its text."""
    return content.decode() if name in AS_TEXT else base64.b64encode(content).decode()


WITH_IT = 200_000
"""Bytes of a ConfigMap that the script and the packages may take beside the code."""


def bring(spec: LaunchSpec, run_dir: Path | None) -> LaunchSpec:
    """The job with its code checked, and where its workers can have it.

    What lies in a bucket travels by a ConfigMap or, when it is too large, by the work claim; what
    lies on a claim of theirs the workers read from there, and hold it to its digest.

    Args:
        spec: The job.
        run_dir: Folder of the run on a claim; None for none.

    Raises:
        InputError: code that cannot be had, is not what its name says, or cannot reach the workers.
        StorageError: the claim cannot be written.
    """
    if not spec.code:
        return spec
    if spec.code.startswith(code.PREFIX):
        code.check(code.from_data_url(spec.code), spec.entry)
        return spec
    if spec.code.startswith("/"):
        _check_mounted(spec, spec.code)
        if os.path.exists(spec.code):  # not where the claim is mounted in the workers alone
            _fetched(spec)
        return spec
    archive = _fetched(spec)
    if len(archive) <= MAP_BYTES - WITH_IT:
        return spec.model_copy(update={"code": code.as_data_url(archive)})
    if run_dir is None:
        raise InputError(
            f"the code has {len(archive):,} bytes packed, more than a ConfigMap brings: mount a "
            "claim on the task and name a folder on it as work_dir"
        )
    file = run_dir / "code" / Path(spec.code).name
    _check_mounted(spec, str(file))
    try:
        file.parent.mkdir(exist_ok=True)
        with atomic_write(file) as into:
            into.write(archive)
        file.chmod(0o644)
    except OSError as error:
        raise StorageError(full(error, str(file))) from error
    return spec.model_copy(update={"code": str(file)})


def _fetched(spec: LaunchSpec) -> bytes:
    """The archive, which is what its name says and can be unpacked."""
    place, _, name = spec.code.rpartition("/")
    archive = open_destination(place or "/").read(name, code.MOST_PACKED)
    if archive is None:
        raise InputError(f"code={spec.code} is not there: upload it with as_folder")
    found, wanted = code.digest_of(archive), code.digest_in(spec.code)
    if found != wanted:
        raise InputError(
            f"code={spec.code} has SHA-256 {found[:12]}..., not the one of its name: upload it anew"
        )
    code.check(archive, spec.entry)
    return archive


def _check_mounted(spec: LaunchSpec, path: str) -> None:
    mounts = [str(each["mountPath"]) for each in spec.volume_mounts] + list(spec.claims)
    if not covering(path, mounts):
        raise InputError(
            f"code {path} lies on no claim that the workers mount; mount one on the task with "
            "kubernetes.mount_pvc"
        )
