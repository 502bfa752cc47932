"""The source of this version in a ConfigMap, for pods of images without it.

A step begins with `started`: an image with kfp_ddp runs the command at once. Another one installs
the packages of its lock and the source from the mounted ConfigMap, by `worker_start.py`.
"""

import base64
import hashlib
import lzma
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kfp_ddp
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.images import KINDS
from kfp_ddp.core.secrets import reason
from kfp_ddp.jobs.code import tar_of
from kfp_ddp.k8s.api import Object

USER = 1000
"""User of the pods: public images have none but root, whom PodSecurity restricted refuses."""
FOLDER = "/etc/kfp-ddp-src"
START, ARCHIVE, NAME, PIP = "start.py", "source.tar.xz", "name", "pip.conf"
"""Files of the ConfigMap."""
DIGEST = "kfp-ddp/source"
"""Label of the ConfigMap: the digest of the source."""
VARIABLE = "KFP_DDP_SOURCE"
"""Name of the ConfigMap that a step was started from; its workers are started from it, too."""
_PACKAGE = Path(kfp_ddp.__file__).parent
_NOT_IN_PODS = ("compiled", "deploy", "images")
_LARGEST = 1 << 20
"""Bytes of a ConfigMap."""
# Its arguments are the name of the ConfigMap, a lock, and the command. Argo holds it six times.
_BEGIN = f"""import importlib.util as u, os, sys
n, l, *c = sys.argv[1:]
s = "{FOLDER}/{START}"
if not u.find_spec("kfp_ddp"):
  if not os.path.exists(s):
    sys.exit(f"error: no kfp_ddp in this image, and no ConfigMap {{n}}: run kfp-ddp install")
  c = ["python3", s, "source", n, l, *c]
os.execvp(c[0], c)
"""


def map_name(state: str = kfp_ddp.__version__) -> str:
    """Return the name of the ConfigMap of a version, or of a digest of a development state.

    KFP names the volume after it, and a volume's name has no dot.
    """
    return f"kfp-ddp-source-{state.replace('.', '-').replace('+', '-')}"


def started(command: Iterable[str], lock: str, name: str = "") -> list[str]:
    """Return the command of a pod, started from the ConfigMap where its image lacks kfp_ddp."""
    return ["python3", "-c", _BEGIN, name or map_name(), lock, *command]


def on_workers(fields: Mapping[str, Any], command: list[str], source: str = "") -> dict[str, Any]:
    """Return `fields` of a job with a command of kfp_ddp, started as the step itself was.

    `source` names the ConfigMap where no step does.
    """
    if not (name := source or os.environ.get(VARIABLE, "")):
        return {**fields, "command": command}
    volumes, mounts = (list(fields.get(one) or ()) for one in ("volumes", "volume_mounts"))
    if not any(mount.get("mountPath") == FOLDER for mount in mounts):  # KFP may have passed it on
        volumes.append({"name": name, "configMap": {"name": name}})
        mounts.append({"name": name, "mountPath": FOLDER, "readOnly": True})
    mounted = {"volumes": volumes, "volume_mounts": mounts}
    command = started(command, "trainer", name)
    return {"run_as_user": USER, **fields, **mounted, "command": command}


def archive() -> bytes:
    """Return the package and the locks of its images as an uncompressed tar."""
    return tar_of((name, path.read_bytes(), 0o644) for name, path in sorted(_files()))


def _files() -> Iterable[tuple[str, Path]]:
    for above, folders, files in os.walk(_PACKAGE, followlinks=True):
        folder = Path(above)
        top = _NOT_IN_PODS if folder == _PACKAGE else ()
        folders[:] = [name for name in folders if name not in ("__pycache__", *top)]
        for path in (folder / name for name in files if not name.endswith((".md", ".pyc"))):
            yield f"kfp_ddp/{path.relative_to(_PACKAGE).as_posix()}", path
    for lock in KINDS:
        yield f"{lock}.lock", _PACKAGE / "images" / lock / "requirements.lock"


def digest_of(content: bytes) -> str:
    """Return the digest of an archive as labels and names have it."""
    return hashlib.sha256(content).hexdigest()[:12]


def is_of(source: Object, digest: str) -> bool:
    """Return whether a ConfigMap has the archive of a digest."""
    return bool(source["metadata"].get("labels", {}).get(DIGEST) == digest)


def config_map(content: bytes, name: str, index: str = "", proxy: str = "") -> Object:
    """Return the ConfigMap of an archive.

    `index` is the package index of the pods, '' for pip's own, and `proxy` what leads to it.
    InputError for an index with a login, or an archive too large for a ConfigMap.
    """
    pip = _pip(index, proxy)
    packed = lzma.compress(content, preset=9)
    start = Path(__file__).with_name("worker_start.py").read_text(encoding="utf-8")
    if (size := len(packed) + len(start) + len(pip) + len(name)) > _LARGEST:
        raise InputError(
            f"the source of kfp_ddp has {size:,} bytes packed, and a ConfigMap {_LARGEST:,}: "
            "build images (images/README.md)"
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": {DIGEST: digest_of(content)}},
        "immutable": True,
        "data": {START: start, NAME: name, **({PIP: pip} if pip else {})},
        "binaryData": {ARCHIVE: base64.b64encode(packed).decode()},
    }


def _pip(index: str, proxy: str) -> str:
    """Return pip's configuration for the pods; '' for pip's defaults."""
    lines = []
    for name, address in (("index-url", index), ("proxy", proxy)):
        if why := reason(address):
            raise InputError(
                f"{name} {why}, which all users of the namespace could read: give an address "
                "without one, or build images (images/README.md)"
            )
        parts = urlsplit(address)
        if address and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise InputError(f"{name} {address!r} is not an http or https address")
        lines += [f"{name} = {address}"] if address else []
        if name == "index-url" and parts.scheme == "http":
            lines.append(f"trusted-host = {parts.hostname}")
    return "\n".join(["[global]", *lines, ""]) if lines else ""
