"""The first program of a pod: unpack the code, install the packages, and exec the command.

    python3 start.py alone|together COMMAND...
    python3 start.py source MAP LOCK COMMAND...

`together` is for several ranks started in one pod: one prepares, the others wait for it. `source`
is for a command of kfp_ddp in an image without it: the source and its LOCK are beside this file,
in the ConfigMap MAP. This uses only the standard library of Python 3.8.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import zlib
from typing import Literal

OURS = "KFP_DDP_"
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet")
PIN = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;+]+)")
ADDRESS = re.compile(
    r"""\b([a-z][a-z0-9+.-]*://)(?:[^\s'"`]*@)?([\w.-]*(?::\d+)?)[^\s'"`),;]*""", re.I
)
PLACE = re.compile(r"((?:\burl|'): )/[^\s'\"`),;]*", re.I)
UNREACHED = re.compile(r"connection broken by '(.*?)': /")
HERE = os.path.dirname(os.path.abspath(__file__)) if "__file__" in globals() else ""
CACHE = "/work/.cache/kfp-ddp-pip"
WITH_TORCH = re.compile(r"(torch|nvidia-.*|cuda-.*|triton)==")
"""Pins that an image with torch has, in its own way."""


class StartError(Exception):
    """An error in one line."""


def main(how: str, command: list[str]) -> None:
    """Prepare and exec the command; on failure exit with one line."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    os.environ.pop(OURS + "START", None)
    try:
        needs = Needs()
        if how == "source":
            folder, command = prepare_source(*command[:2]), command[2:]
        else:
            folder = shared(needs) if how == "together" else needs.prepare(None)
        paths = [os.path.join(folder, name) for name in ("code", "packages")]
        paths = [path for path in paths if os.path.isdir(path)]
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, before] if before else paths)
        if needs.code is not None:
            os.chdir(os.path.join(folder, "code"))
        os.execvp(command[0], command)  # noqa: S606
    except StartError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: cannot start {error.filename or command[0]}: {error.strerror}")


def prepare_source(name: str, lock: str) -> str:
    """Return a new folder with the source of the ConfigMap `name`, and the packages of a lock."""
    if (own := _read("name").decode()) != name:
        raise StartError(f"the ConfigMap is {own}, not {name}: run kfp-ddp install of this version")
    folder = tempfile.mkdtemp(prefix="kfp-ddp-")
    code = os.path.join(folder, "code")
    _extract(_read("source.tar.xz"), code, "r:xz")
    with open(os.path.join(code, f"{lock}.lock"), encoding="utf-8") as file:
        lines = re.sub(r"\\\n", " ", file.read()).splitlines()
    if importlib.util.find_spec("torch") is not None:
        lines = [line for line in lines if not WITH_TORCH.match(line)]
    if os.path.exists(pip_conf := os.path.join(HERE, "pip.conf")):
        os.environ["PIP_CONFIG_FILE"] = pip_conf
    on_claim = os.path.ismount("/work") and os.access("/work", os.W_OK)
    install(lines, [], folder, CACHE if on_claim else "")
    os.environ["KFP_DDP_SOURCE"] = name
    os.environ.setdefault("USER", "kfp")  # torch asks for a name, which a bare user id has not
    if not os.access(os.path.expanduser("~"), os.W_OK):
        os.environ["HOME"] = folder
    return folder


def _read(name: str) -> bytes:
    """Return a file beside this one."""
    with open(os.path.join(HERE, name), "rb") as file:
        return file.read()


def shared(needs: Needs) -> str:
    """Return the folder shared by the ranks of our parent, prepared by the first of them."""
    above = os.path.join(tempfile.gettempdir(), f"kfp-ddp-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(above, 0o700)
    if os.lstat(above).st_uid != os.getuid():
        raise StartError(f"{above} belongs to another user; remove it")
    parent = os.getppid()
    with open(f"/proc/{parent}/stat") as file:
        started = file.read().rpartition(")")[2].split()[19]
    folder = os.path.join(above, f"{parent}-{started}")
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.isdir(folder):
            os.rename(needs.prepare(above), folder)
    return folder


class Needs:
    """The files of the job, whose variables are removed from the environment."""

    def __init__(self) -> None:
        self.code = _take("CODE")
        self.digest = os.environ.pop(OURS + "CODE_SHA256", "")
        self.packages = (_take("PACKAGES") or b"").decode().splitlines()
        self.urls = os.environ.pop(OURS + "PIP_INDEX_URLS", "").split()

    def prepare(self, above: str | None) -> str:
        """Return a new folder with all of them, in the folder `above`."""
        folder = tempfile.mkdtemp(prefix="kfp-ddp-", dir=above)
        if self.code is not None:
            unpack(self.code, self.digest, os.path.join(folder, "code"))
        if self.packages:
            install(self.packages, self.urls, folder)
        return folder


def _take(name: str) -> bytes | None:
    """Return the content of a variable, or of the file that it names; None for neither."""
    text, path = os.environ.pop(OURS + name, None), os.environ.pop(f"{OURS}{name}_FILE", None)
    if text is not None:
        return base64.b64decode(text)
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise StartError(f"cannot read {path}: {error.strerror}") from None


def unpack(archive: bytes, digest: str, folder: str) -> None:
    """Write the files of an archive below a new folder, and nowhere else."""
    actual = hashlib.sha256(archive).hexdigest()
    if actual != digest:
        raise StartError(f"the code has SHA-256 {actual[:12]}..., not {digest[:12]}... as packed")
    _extract(archive, folder, "r:gz")


def _extract(archive: bytes, folder: str, mode: Literal["r:gz", "r:xz"]) -> None:
    os.mkdir(folder)
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode=mode) as opened:
            for member in opened:
                parts = member.name.split("/")
                content = opened.extractfile(member) if member.isreg() else None
                if content is None or not set(parts).isdisjoint(("", ".", "..")):
                    raise StartError(
                        f"{member.name!r} in the code is not a plain file below its folder"
                    )
                path = os.path.join(folder, *parts)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                with open(os.open(path, flags, 0o600 | member.mode & 0o755), "wb") as file:
                    file.write(content.read())
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise StartError(f"the code cannot be unpacked: {error}") from None


def install(lines: list[str], urls: list[str], folder: str, cache: str = "") -> None:
    """Install the missing pins into a folder, single ones with dependencies; `cache` is pip's."""
    locked = "--hash=" in lines[0]
    options = ["--cache-dir", cache or os.path.join(folder, "cache")]
    options += ["--no-deps", "--require-hashes"] if locked else []
    for at, url in enumerate(urls):
        options += ["--extra-index-url" if at else "--index-url", url]
    requirements = os.path.join(folder, "requirements.txt")
    report = os.path.join(folder, "report.json")
    if locked:
        pins = [line for line in lines if not is_installed(line)]
    else:
        _write(requirements, lines)
        pip("--dry-run", "--report", report, "--requirement", requirements, *options)
        with open(report, encoding="utf-8") as file:
            missing = [item["metadata"] for item in json.load(file)["install"]]
        pins = [f"{item['name']}=={item['version']}" for item in missing]
    if not pins:
        return
    print("installing", ", ".join(pin.partition(" ")[0] for pin in pins), flush=True)
    _write(requirements, pins)
    # Most modules of a package are not used in this pod: Python compiles those that are.
    into = ["--target", os.path.join(folder, "packages"), "--no-deps", "--no-compile"]
    pip("--requirement", requirements, *into, *options)


def is_installed(pin: str) -> bool:
    """Return whether the image has the version of a pin, of any build."""
    match = PIN.match(pin)
    try:
        version = importlib.metadata.version(match[1]) if match else ""
    except importlib.metadata.PackageNotFoundError:
        return False
    return match is not None and version.partition("+")[0] == match[2]


def _write(path: str, lines: list[str]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


def masked(text: str) -> str:
    """Return a log with the hosts of addresses alone: path or query of an index may be a secret."""
    return PLACE.sub(r"\1/…", ADDRESS.sub(r"\1\2/…", text))


def pip(*arguments: str) -> None:
    """Run pip; its cause of a failure follows the first ERROR."""
    done = subprocess.run(
        [sys.executable, *PIP, *arguments],
        env={**os.environ, "PIP_USER": "0"},  # which some images set, and --target excludes
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode == 0:
        return
    printed = masked(done.stdout)
    print(printed, file=sys.stderr, flush=True)
    _, *errors = printed.split("ERROR: ")
    reason = errors[0] if errors else (printed.strip().splitlines() or ["no output"])[-1]
    reason = " ".join(reason.split())[:400]
    if unreached := UNREACHED.findall(printed):
        reason += f" (the index cannot be reached: {unreached[-1]})"
    raise StartError(f"packages cannot be installed: {reason}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
