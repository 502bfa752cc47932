"""What a job brings to its workers besides their image: files in a map, or in variables."""

import base64
from collections.abc import Mapping
from pathlib import Path

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.specification import code
from kfp_ddp.jobs.specification.launch_spec import LaunchSpec
from kfp_ddp.jobs.specification.script import unexpanded

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
