"""What a worker runs first: it unpacks the code, installs the packages, and becomes the command.

    python3 start.py alone|together COMMAND...

`together` is for ranks that one process starts in a pod: one prepares, the others wait for it. It
runs in images that hold nothing of ours, so it has the standard library alone, as of Python 3.8.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import zlib

OURS = "KFP_DDP_"
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet")
NAME = re.compile(r"[A-Za-z0-9._-]+")
UNREACHED = re.compile(r"connection broken by '(.*?)': /")


class Failure(Exception):  # noqa: N818
    """What cannot be prepared, in one line."""


def main(how: str, command: list[str]) -> None:
    """Prepare, and become the command; ends with one line where that cannot be."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    os.environ.pop(OURS + "START", None)
    try:
        needs = Needs()
        place = shared(needs) if how == "together" else needs.prepared(None)
        paths = [os.path.join(place, name) for name in ("code", "packages")]
        paths = [path for path in paths if os.path.isdir(path)]
        given = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, given] if given else paths)
        if needs.code is not None:
            os.chdir(os.path.join(place, "code"))
        os.execvp(command[0], command)  # noqa: S606
    except Failure as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: cannot start {error.filename or command[0]}: {error.strerror}")


def shared(needs: Needs) -> str:
    """The folder of the ranks that our parent starts, prepared by the first of them."""
    above = os.path.join(tempfile.gettempdir(), f"kfp-ddp-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(above, 0o700)
    if os.lstat(above).st_uid != os.getuid():
        raise Failure(f"{above} belongs to somebody else; remove it")
    parent = os.getppid()
    with open(f"/proc/{parent}/stat") as file:
        started = file.read().rpartition(")")[2].split()[19]
    place = os.path.join(above, f"{parent}-{started}")
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.isdir(place):
            os.rename(needs.prepared(above), place)
    return place


class Needs:
    """What came with the job, which the command finds no more in its environment."""

    def __init__(self) -> None:
        self.code = _taken("CODE")
        self.digest = os.environ.pop(OURS + "CODE_SHA256", "")
        self.packages = (_taken("PACKAGES") or b"").decode().splitlines()
        self.urls = os.environ.pop(OURS + "PIP_INDEX_URLS", "").split()

    def prepared(self, above: str | None) -> str:
        """A new folder with all of it, in the folder `above`."""
        place = tempfile.mkdtemp(prefix="kfp-ddp-", dir=above)
        if self.code is not None:
            unpack(self.code, self.digest, os.path.join(place, "code"))
        if self.packages:
            install(self.packages, self.urls, place)
        return place


def _taken(name: str) -> bytes | None:
    """What came under a name, in a variable or in a file; None if nothing did."""
    text, path = os.environ.pop(OURS + name, None), os.environ.pop(f"{OURS}{name}_FILE", None)
    if text is not None:
        return base64.b64decode(text)
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise Failure(f"cannot read {path}: {error.strerror}") from None


def unpack(archive: bytes, digest: str, folder: str) -> None:
    """Write the files of an archive below a new folder; nothing in it leads elsewhere."""
    found = hashlib.sha256(archive).hexdigest()
    if found != digest:
        raise Failure(f"the code has SHA-256 {found[:12]}..., not {digest[:12]}... as was packed")
    os.mkdir(folder)
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as opened:
            for member in opened:
                parts = member.name.split("/")
                content = opened.extractfile(member) if member.isreg() else None
                if content is None or not set(parts).isdisjoint(("", ".", "..")):
                    raise Failure(f"{member.name!r} in the code is no plain file below its folder")
                path = os.path.join(folder, *parts)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                with open(os.open(path, flags, 0o600 | member.mode & 0o755), "wb") as file:
                    file.write(content.read())
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise Failure(f"the code cannot be unpacked: {error}") from None


def install(lines: list[str], urls: list[str], place: str) -> None:
    """Install what the image lacks of some pins into a folder of its own.

    A pin comes with what it depends on; a lock names all, and is held to its hashes.
    """
    locked = "--hash=" in lines[0]
    options = ["--cache-dir", os.path.join(place, "cache")]
    options += ["--no-deps", "--require-hashes"] if locked else []
    for at, url in enumerate(urls):
        options += ["--extra-index-url" if at else "--index-url", url]
    wanted, report = os.path.join(place, "requirements.txt"), os.path.join(place, "report.json")
    _write(wanted, lines)
    pip("--dry-run", "--report", report, "--requirement", wanted, *options)
    with open(report, encoding="utf-8") as file:
        missing = [each["metadata"] for each in json.load(file)["install"]]
    if not missing:
        return
    pins = [f"{each['name']}=={each['version']}" for each in missing]
    print("installing", ", ".join(pins), flush=True)
    if locked:
        names = {_canonical(pin) for pin in pins}
        pins = [line for line in lines if _canonical(line) in names]
    _write(wanted, pins)
    into = ["--target", os.path.join(place, "packages"), "--no-deps"]
    pip("--requirement", wanted, *into, *options)


def _canonical(pin: str) -> str:
    """The name in a pin as all of its spellings have it."""
    found = NAME.match(pin)
    return re.sub(r"[-_.]+", "-", found.group()).lower() if found else pin


def _write(path: str, lines: list[str]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


def pip(*arguments: str) -> None:
    """Run pip, which tells its cause after the first ERROR."""
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
    print(done.stdout, file=sys.stderr, flush=True)
    _, *errors = done.stdout.split("ERROR: ")
    said = errors[0] if errors else (done.stdout.strip().splitlines() or ["no output"])[-1]
    said = " ".join(said.split())[:400]
    if unreached := UNREACHED.findall(done.stdout):
        said += f" (the index cannot be reached: {unreached[-1]})"
    raise Failure(f"packages cannot be installed: {said}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
