"""The first program of a pod: unpack the code, install the packages, and exec the command.

    python3 start.py alone|together COMMAND...

    python3 start.py source NAME LOCK COMMAND...

`together` is for several ranks started in one pod: one prepares, the others wait for it. `source`
is for a command of kfp_ddp in an image without it: the source is in the ConfigMap NAME. This uses
only the standard library of Python 3.8.
"""

from __future__ import annotations

import ast
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
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import zlib
from typing import Literal

OURS = "KFP_DDP_"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
PIN = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;+]+)")
ADDRESS = re.compile(
    r"""\b([a-z][a-z0-9+.-]*://)(?:[^\s'"`]*@)?([\w.-]*(?::\d+)?)[^\s'"`),;]*""", re.I
)
PLACE = re.compile(r"((?:\burl|'): )/[^\s'\"`),;]*", re.I)
UNREACHED = re.compile(r"connection broken by '(.*?)': /")
BY_HASH = ("--no-deps", "--require-hashes", "--only-binary", ":all:")
"""Options of pip and uv: what has no wheel would be built by tools without a hash."""
AS_UV = {
    "index-url": ("UV_DEFAULT_INDEX",),
    "extra-index-url": ("UV_INDEX",),
    "trusted-host": ("UV_INSECURE_HOST",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"),
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
}
"""Variables of uv, by the option of pip's configuration that they stand for."""
SAFE = {"UV_NO_CONFIG": "1", "UV_SYSTEM_CERTS": "1", "UV_PYTHON_DOWNLOADS": "never"}
"""Variables of uv: no file of a folder above, and the image's certificates, as pip has them."""
SOURCE = ""
"""SHA-256 of the archive of the source, as the ConfigMap's copy of this program has it."""
FOLDER = "/etc/kfp-ddp-src"
MOUNTED = "KFP_DDP_MOUNTED"
"""Variable with the folder of the ConfigMap's files, where that is another one."""
ARCHIVE = "source.tar.xz"
LARGEST = 1 << 26
"""Bytes of the source, and of memory to unpack it."""
IN_MAP = ("index-url", "proxy", "trusted-host")
"""Options of pip that are files of the ConfigMap: none of them lets pip run another program."""
WITH_TORCH = re.compile(r"(torch|nvidia-.*|cuda-.*|triton)==")
"""Pins that an image with torch has, in its own way."""

MORE = {"launcher": {"mlflow": "mlflow", "parquet": "hf://"}}
"""Further locks of a lock, and the word of a step that needs one: each takes seconds to install."""


class StartError(Exception):
    """An error in one line."""


def main(how: str, command: list[str]) -> None:
    """Prepare and exec the command; on failure exit with one line."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    os.environ.pop(OURS + "START", None)
    try:
        needs = Needs()
        if how == "source":
            name, lock, *command = command
            folder = prepare_source(name, [lock, *more_locks(lock, command)])
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


def more_locks(lock: str, command: list[str]) -> list[str]:
    """Return the further locks of a step, by its arguments and its environment."""
    words = " ".join([*command, *os.environ]).lower()
    return [name for name, word in MORE.get(lock, {}).items() if word in words]


def prepare_source(name: str, locks: list[str]) -> str:
    """Return a new folder with the source of the ConfigMap `name`, and the packages of locks."""
    mounted = os.environ.pop(MOUNTED, FOLDER)
    with open(os.path.join(mounted, ARCHIVE), "rb") as file:
        content = unpacked(file.read())
    if hashlib.sha256(content).hexdigest() != SOURCE:
        raise StartError(f"ConfigMap {name} has another source than its name: run kfp-ddp install")
    folder = tempfile.mkdtemp(prefix="kfp-ddp-")
    code = os.path.join(folder, "code")
    _extract(content, code, "r:")
    # Two locks may have the same line, and a lock two versions of a package by markers.
    lines = list(dict.fromkeys(pin for lock in locks for pin in _pins(code, lock)))
    if importlib.util.find_spec("torch") is not None:
        lines = [line for line in lines if not WITH_TORCH.match(line)]
    for option in IN_MAP:
        with open(os.path.join(mounted, option), encoding="utf-8") as file:
            if text := file.read().strip():
                os.environ["PIP_" + option.upper().replace("-", "_")] = text
    install(lines, [], folder, _pins(code, "uv"))
    os.environ["KFP_DDP_SOURCE"] = name
    os.environ.setdefault("USER", "kfp")  # torch asks for a name, which a bare user id has not
    if not os.access(os.path.expanduser("~"), os.W_OK):
        os.environ["HOME"] = folder
    return folder


def unpacked(packed: bytes) -> bytes:
    """Return the content of an xz file, and at most LARGEST bytes."""
    try:
        return lzma.LZMADecompressor(memlimit=LARGEST).decompress(packed, LARGEST)
    except (EOFError, lzma.LZMAError) as error:
        raise StartError(f"the source cannot be unpacked: {error}") from None


def _pins(code: str, lock: str) -> list[str]:
    """Return the pins of a lock of our images, one for each line."""
    path = os.path.join(code, "kfp_ddp", "images", lock, "requirements.lock")
    with open(path, encoding="utf-8") as file:
        return re.sub(r"\\\n", " ", file.read()).splitlines()


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
        self.uv = (_take("UV") or b"").decode().splitlines()
        self.urls = os.environ.pop(OURS + "PIP_INDEX_URLS", "").split()

    def prepare(self, above: str | None) -> str:
        """Return a new folder with all of them, in the folder `above`."""
        folder = tempfile.mkdtemp(prefix="kfp-ddp-", dir=above)
        if self.code is not None:
            unpack(self.code, self.digest, os.path.join(folder, "code"))
        if self.packages:
            install(self.packages, self.urls, folder, self.uv)
        return folder


def _take(name: str) -> bytes | None:
    """Return the content of a variable, or of the file that it names; None for neither."""
    text = os.environ.pop(OURS + name, None)
    path = os.environ.pop(f"{OURS}{name}_FILE", None)
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


def _extract(archive: bytes, folder: str, mode: Literal["r:gz", "r:"]) -> None:
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
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise StartError(f"the code cannot be unpacked: {error}") from None


def install(lines: list[str], urls: list[str], folder: str, uv_pins: list[str]) -> None:
    """Install the missing pins into a folder, single ones with dependencies."""
    locked = "--hash=" in lines[0]
    if locked:
        pins = [line for line in lines if not is_installed(line)]
        uv = Uv.obtain(uv_pins, urls, folder) if pins else None
    else:
        uv = Uv.obtain(uv_pins, urls, folder) if len(urls) > 1 else None
        requirements = _write(folder, "requirements.txt", lines)
        pins = uv.missing(requirements) if uv else _missing(requirements, urls, folder)
    if not pins:
        return
    print("installing", ", ".join(pin.partition(" ")[0] for pin in pins), flush=True)
    packages = os.path.join(folder, "packages")
    into = ["--requirement", _write(folder, "pins.txt", pins), "--target", packages]
    into += BY_HASH if locked else ["--no-deps"]
    if uv is not None:
        done = uv.install(*into)
        shutil.rmtree(uv.folder, ignore_errors=True)
        if done.returncode == 0:
            return
        # The image may have settings of pip that uv lacks.
        print(f"uv cannot install: {_one_line(done.stderr)}", file=sys.stderr)
        shutil.rmtree(packages, ignore_errors=True)
    # Most modules of a package are not used in this pod: Python compiles those that are.
    pip(folder, "--no-compile", *into, *_indexes(urls))


def _missing(requirements: str, urls: list[str], folder: str) -> list[str]:
    """Return the pins that the image lacks, with dependencies, as pip resolves them."""
    if len(urls) > 1:
        raise StartError(
            "packages cannot be installed: pip would take a name from any of several indexes, and "
            "none of them has uv: lock the packages with hashes, or give one index"
        )
    report = os.path.join(folder, "report.json")
    options = ["--dry-run", "--report", report, *_indexes(urls)]
    pip(folder, "--requirement", requirements, *options)
    with open(report, encoding="utf-8") as file:
        missing = [item["metadata"] for item in json.load(file)["install"]]
    return [f"{item['name']}=={item['version']}" for item in missing]


def _indexes(urls: list[str]) -> list[str]:
    """Return pip's options for the indexes of a job."""
    options = []
    for at, url in enumerate(urls):
        options += ["--extra-index-url" if at else "--index-url", url]
    return options


class Uv:
    """The program uv, installed by hash into a folder of its own."""

    def __init__(self, folder: str, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment

    @classmethod
    def obtain(cls, pins: list[str], urls: list[str], folder: str) -> Uv | None:
        """Return it; None where there is no wheel of it for this machine, or on the index."""
        own = os.path.join(folder, "uv")
        options = ["--retries", "1", "--no-compile", *BY_HASH]
        options += ["--requirement", _write(folder, "uv.txt", pins), "--target", own]
        # Both at once: each takes a third of a second to start.
        listing = [*PIP, "config", "list"]
        with subprocess.Popen(listing, cwd=folder, stdout=subprocess.PIPE) as listed:
            done = _pip(folder, *options, *_indexes(urls))
            configuration = listed.communicate()[0].decode()
        if not os.path.exists(os.path.join(own, "bin", "uv")):
            print(f"pip installs, as there is no uv: {_one_line(done.stderr)}", file=sys.stderr)
            return None
        return cls(own, {**os.environ, **SAFE, **as_uv(configuration), **_in_order(urls)})

    def install(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run its `pip install` for this Python, with a cache that no other pod sees."""
        command = [os.path.join(self.folder, "bin", "uv"), "pip", "install", "--quiet"]
        command += ["--cache-dir", os.path.join(self.folder, "cache")]
        command += ["--python", sys.executable, *options]
        return _run(command, self.folder, self.environment)

    def missing(self, requirements: str) -> list[str]:
        """Return the pins that the image lacks, with dependencies, as uv resolves them."""
        options = ["--dry-run", "--output-format", "json", "--break-system-packages"]
        done = self.install("--requirement", requirements, *options)
        if done.returncode != 0:
            raise StartError(f"packages cannot be installed: {_one_line(done.stderr)}")
        changes = json.loads(done.stdout)["changes"]
        new = [one for one in changes if one["action"] == "installed"]
        return [f"{one['name']}=={one['version']}" for one in new]


def as_uv(configuration: str) -> dict[str, str]:
    """Return what `pip config list` prints as variables of uv."""
    environment: dict[str, str] = {}
    for scope in ("global", "install", ":env:"):
        for option, value in re.findall(rf"^{scope}\.([a-z-]+)=(.*)$", configuration, re.M):
            if text := " ".join(ast.literal_eval(value).split()):
                environment.update(dict.fromkeys(AS_UV.get(option, ()), text))
    return environment


def _in_order(urls: list[str]) -> dict[str, str]:
    """Return uv's variables for the indexes of a job: the first that has a name counts."""
    if not urls:
        return {}
    return {"UV_INDEX": " ".join(urls[:-1]), "UV_DEFAULT_INDEX": urls[-1]}


def is_installed(pin: str) -> bool:
    """Return whether the image has the version of a pin, of any build."""
    match = PIN.match(pin)
    try:
        version = importlib.metadata.version(match[1]) if match else ""
    except importlib.metadata.PackageNotFoundError:
        return False
    return match is not None and version.partition("+")[0] == match[2]


def _write(folder: str, name: str, lines: list[str]) -> str:
    """Write lines to a file of a folder; return its path."""
    path = os.path.join(folder, name)
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    return path


def masked(text: str) -> str:
    """Return a log with the hosts of addresses alone: path or query of an index may be a secret."""
    return PLACE.sub(r"\1/…", ADDRESS.sub(r"\1\2/…", text))


def pip(folder: str, *options: str) -> None:
    """Run `pip install`; its cause of a failure follows the first ERROR."""
    done = _pip(folder, *options)
    if done.returncode == 0:
        return
    text = masked(done.stdout + done.stderr)
    print(text, file=sys.stderr, flush=True)
    _, *causes = text.split("ERROR: ")
    reason = causes[0] if causes else (text.strip().splitlines() or ["no output"])[-1]
    reason = _one_line(reason)
    if unreached := UNREACHED.findall(text):
        reason += f" (the index cannot be reached: {unreached[-1]})"
    if ":all:" in options and "from versions" in reason:
        reason += " (of a lock only wheels are installed)"
    raise StartError(f"packages cannot be installed: {reason}")


def _pip(folder: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `pip install` without `--user`, which some images set and --target excludes."""
    command = [*PIP, "install", "--quiet", "--no-cache-dir", *options]
    return _run(command, folder, {**os.environ, "PIP_USER": "0"})


def _run(
    command: list[str], folder: str, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder of ours: Python would import a pip.py of any other folder."""
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )


def _one_line(text: str) -> str:
    """Return a message without line breaks, uv's drawings and what an address may hide."""
    return " ".join(re.sub(r"[×│╰─▶├]|\bERROR: ", " ", masked(text)).split())[:400]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
