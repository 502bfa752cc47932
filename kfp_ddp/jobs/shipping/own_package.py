"""The source of this version in a ConfigMap, for pods of images without it.

A step begins with `started`: an image with kfp_ddp runs the command at once. Another one runs the
start program of the mounted ConfigMap, if it has the digest that stands in the name, and so in the
command. The program, `worker_start.py`, has the digest of the archive, and installs its lock.
"""

import base64
import functools
import hashlib
import lzma
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kfp_ddp
from kfp_ddp.core.container_images import KINDS, lock_of
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.secrets import reason
from kfp_ddp.jobs.shipping import worker_start
from kfp_ddp.jobs.shipping.code import digest_of, tar_of
from kfp_ddp.jobs.shipping.worker_start import ARCHIVE, FOLDER, IN_MAP, MOUNTED
from kfp_ddp.k8s.api import Object

USER = 1000
"""User of the pods: public images have none but root, whom PodSecurity restricted refuses."""
START = "start.py"
"""File of the ConfigMap; the others are ARCHIVE, and options of pip."""
VARIABLE = "KFP_DDP_SOURCE"
"""Name of the ConfigMap that a step was started from; its workers are started from it, too."""
_PACKAGE = Path(kfp_ddp.__file__).parent
_NOT_IN_PODS = ("compiled", "deploy", "images")
_SUFFIXES = (".css", ".html", ".jinja", ".py", ".toml", ".txt")
_LOCKS = (*KINDS, *worker_start.MORE["launcher"], "uv")
_LARGEST = 1 << 20
"""Bytes of a ConfigMap."""
_DIGITS = 32
API = "https://kubernetes.default.svc"
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Address of the API server in each pod, and folder of the token of its account."""
MAPS = "kfp-ddp-source-"
"""Begin of the names of the ConfigMaps of all versions."""
# KFP names the volume after the ConfigMap, and a volume's name has no dot.
_PREFIX = f"{MAPS}{re.sub('[.+]', '-', kfp_ddp.__version__)}-"
# Their arguments are the name of the ConfigMap, a lock, and the command. Argo holds it six times.
_HEAD = f"""import hashlib, importlib.util as u, os, sys
_, n, _, *c = sys.argv[1:]
if u.find_spec("kfp_ddp"):
  from kfp_ddp import __version__ as v
  if v != "{kfp_ddp.__version__}":
    sys.exit(f"error: this image has kfp_ddp {{v}}, not {kfp_ddp.__version__}: build it again")
  os.execvp(c[0], c)
f = "{FOLDER}"
"""
# What no volume brings is read from the API server, by the account of the pod.
_READ = f"""if not os.path.exists(f):
  import base64, json, ssl, tempfile, urllib.request as r
  try:
    t, s = [open("{ACCOUNT}/" + k).read() for k in ("token", "namespace")]
    x = ssl.create_default_context(cafile="{ACCOUNT}/ca.crt")
    o = r.build_opener(r.ProxyHandler({{}}), r.HTTPSHandler(context=x))
    a = f"{API}/api/v1/namespaces/{{s}}/configmaps/{{n}}"
    m = json.load(o.open(r.Request(a, headers={{"Authorization": "Bearer " + t}}), timeout=60))
  except OSError as e:
    sys.exit(f"error: ConfigMap {{n}} cannot be read ({{e}}): run kfp-ddp install")
  f = os.environ["{MOUNTED}"] = tempfile.mkdtemp(prefix="kfp-ddp-")
  d = {{k: w.encode() for k, w in m["data"].items()}}
  d.update({{k: base64.b64decode(w) for k, w in m["binaryData"].items()}})
  for k, w in d.items():
    with open(os.path.join(f, os.path.basename(k)), "wb") as g:
      g.write(w)
"""
_TAIL = f"""try:
  with open(f + "/{START}", "rb") as g:
    b = g.read()
except OSError:
  sys.exit(f"error: no kfp_ddp in this image, and no ConfigMap {{n}}: run kfp-ddp install")
if hashlib.sha256(b).hexdigest()[:{_DIGITS}] != n[-{_DIGITS}:]:
  sys.exit(f"error: ConfigMap {{n}} has another source than its name: run kfp-ddp install")
exec(b)
"""


@functools.cache
def map_name() -> str:
    """Return the name of the ConfigMap: of this version, and of the digest of the source."""
    return name_of(start_of(archive()))


def name_of(start: str) -> str:
    """Return the name of the ConfigMap of a start program, which has the digest of its archive."""
    return _PREFIX + hashlib.sha256(start.encode()).hexdigest()[:_DIGITS]


def start_of(content: bytes) -> str:
    """Return the program that unpacks an archive, and no other one."""
    text = Path(worker_start.__file__).read_text(encoding="utf-8")
    return text.replace(f'SOURCE = "{worker_start.SOURCE}"', f'SOURCE = "{digest_of(content)}"', 1)


def renamed(document: str, name: str) -> str:
    """Return a compiled pipeline of this version that uses another ConfigMap."""
    return re.sub(rf"{_PREFIX}[0-9a-f]{{{_DIGITS}}}", name, document)


def started(command: Iterable[str], lock: str, name: str = "") -> list[str]:
    """Return the command of a pod, started from the ConfigMap where its image lacks kfp_ddp."""
    program = _HEAD + _TAIL
    return ["python3", "-c", program, "source", name or map_name(), lock, *command]


def alone(command: Iterable[str], lock: str, name: str = "") -> list[str]:
    """Return such a command for a pod to which nothing mounts the ConfigMap.

    Its account needs the right to read ConfigMaps, which deploy/rbac grants.
    """
    program = _HEAD + _READ + _TAIL
    return ["python3", "-c", program, "source", name or map_name(), lock, *command]


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


@functools.cache
def archive(package: Path = _PACKAGE) -> bytes:
    """Return a package and the locks of its images as a tar: everywhere the same bytes."""
    return tar_of((name, path.read_bytes(), 0o644) for name, path in sorted(_files(package)))


def _files(package: Path) -> Iterable[tuple[str, Path]]:
    """Yield what pods need by its name, and no backup, cache or library that was left there."""
    for above, folders, files in os.walk(package, followlinks=True):
        folder = Path(above)
        left_out = _NOT_IN_PODS if folder == package else ("tests",)
        visible = [name for name in folders if name[0] != "."]
        folders[:] = [name for name in visible if name not in left_out]
        for name in files:
            path = folder / name
            if name.endswith(_SUFFIXES) and name[0] != ".":
                yield f"kfp_ddp/{path.relative_to(package).as_posix()}", path
    for image in _LOCKS:
        path = lock_of(image, package)
        yield f"kfp_ddp/{path.relative_to(package).as_posix()}", path


def has_source(found: Object) -> bool:
    """Return whether a ConfigMap has the bytes of this source, whatever it says of itself."""
    content = archive()
    try:
        packed = base64.b64decode(found["binaryData"][ARCHIVE])
        return (
            found["data"][START] == start_of(content) and worker_start.unpacked(packed) == content
        )
    except (LookupError, TypeError, ValueError, worker_start.StartError):
        return False


def config_map(name: str, index: str = "", proxy: str = "") -> Object:
    """Return the ConfigMap of this source.

    `index` is the package index of the pods, '' for pip's own, and `proxy` what leads to it.
    InputError for an index with a login, or an archive too large for a ConfigMap.
    """
    data = {START: start_of(archive()), **_pip(index, proxy)}
    packed = _packed()
    if (size := len(packed) + sum(map(len, data.values()))) > _LARGEST:
        raise InputError(
            f"the source of kfp_ddp has {size:,} bytes packed, and a ConfigMap {_LARGEST:,}: "
            "build images (images/README.md)"
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/part-of": "kfp-ddp"}},
        "data": data,
        "binaryData": {ARCHIVE: base64.b64encode(packed).decode()},
    }


@functools.cache
def _packed() -> bytes:
    return lzma.compress(archive())


def _pip(index: str, proxy: str) -> dict[str, str]:
    """Return options of pip for the pods, as `IN_MAP` has them; '' for pip's defaults."""
    trusted = ""
    for name, address in (("index-url", index), ("proxy", proxy)):
        if why := reason(address):
            raise InputError(
                f"{name} {why}, which all users of the namespace could read: give an address "
                "without one, or build images (images/README.md)"
            )
        parts = urlsplit(address)
        is_http = parts.scheme in ("http", "https") and parts.hostname
        if address and not is_http:
            raise InputError(f"{name} {address!r} is not an http or https address")
        if name == "index-url" and parts.scheme == "http":
            trusted = str(parts.hostname)
    return dict(zip(IN_MAP, (index, proxy, trusted), strict=True))
