"""A folder of code on its way from where it lies to the workers of a job."""

import os
from pathlib import Path

from kfp_ddp.core.errors import InputError, StorageError, full
from kfp_ddp.core.files import atomic_write
from kfp_ddp.jobs.manifests.carried import MAP_BYTES
from kfp_ddp.jobs.specification import code
from kfp_ddp.jobs.specification.claims import covering
from kfp_ddp.jobs.specification.launch_spec import LaunchSpec
from kfp_ddp.storage.destination import open_destination

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
