"""Check a release as it is on disk, apart from how it was made."""

import json
import re
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from kfp_ddp import __version__
from release.artifacts import (
    LOCKED,
    ROOT,
    SUMS,
    ReleaseError,
    by_name,
    expected,
    files,
    run,
    sha256,
)

WHEEL = f"kfp_ddp-{__version__}-py3-none-any.whl"
SDIST = f"kfp_ddp-{__version__}.tar.gz"
IMAGE = re.compile(r"[\w./:-]+/(?:launcher|server|trainer)[:@][\w.:-]+")
LINKED = ("compiled", "components", "deploy", "images", "pipelines", "training")
"""Folders that are links in `kfp_ddp/`."""
WHERE = "import kfp_ddp, sys; print(kfp_ddp.__file__); from kfp_ddp.cli import main; main()"


def verify(out: Path, images: Sequence[str]) -> None:
    """Raise ReleaseError for the first thing that is missing, superfluous or wrong."""
    allowed = set(by_name(images).values())
    names = {path.relative_to(out).as_posix() for path in files(out)}
    if names != expected():
        raise ReleaseError(f"{out} misses, or should not have: {sorted(names ^ expected())}")
    listed = "".join(f"{sha256(path)}  {path.relative_to(out)}\n" for path in files(out))
    if (out / SUMS).read_text() != listed:
        raise ReleaseError(f"{SUMS} is not of these files")
    for name in LOCKED:
        check_sbom(out / f"{name}.cdx.json", ROOT / "images" / name / "requirements.lock")
    for path in sorted((out / "compiled").glob("*.yaml")):
        ours = set(IMAGE.findall(path.read_text()))
        if not ours or not ours <= allowed:
            raise ReleaseError(f"{path.name} names {sorted(ours)}, not the images by digest")
    with tempfile.TemporaryDirectory() as folder:
        check_wheel(out / WHEEL, Path(folder))
        check_sdist(out / SDIST, out / WHEEL, Path(folder))
    print(f"{out}: {len(names)} files of version {__version__} are as they should be")


def check_wheel(wheel: Path, folder: Path) -> None:
    """Check that a wheel has each tracked file of the package but tests, and starts alone."""
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    command = ["git", "ls-files", "kfp_ddp", *LINKED]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = (name for name in listed.splitlines() if "/tests/" not in name)
    tracked = {name.removeprefix("kfp_ddp/") for name in names} - {*LINKED}
    if inside != {f"kfp_ddp/{name}" for name in tracked}:
        differ = sorted(inside ^ {f"kfp_ddp/{name}" for name in tracked})
        raise ReleaseError(f"{wheel.name} and the tracked files differ by {differ[:5]}")
    alone = str(folder / "alone")
    run("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", alone, str(wheel))
    shown = run("-P", "-c", WHERE, "--version", PYTHONPATH=alone)
    origin, _, version = shown.partition("\n")
    if not origin.startswith(str(folder)) or __version__ not in version.split():
        raise ReleaseError(f"{wheel.name} alone shows {shown!r} as its version")


def check_sdist(sdist: Path, wheel: Path, folder: Path) -> None:
    """Check that an sdist is built to the same wheel, byte by byte."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz")
    run("-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(source))
    if sha256(folder / wheel.name) != sha256(wheel):
        raise ReleaseError(f"{sdist.name} is built to another wheel than {wheel.name}")


def check_sbom(sbom: Path, lock: Path) -> None:
    """Check that a bill of materials has each package of the lock for Linux once, and us."""
    document = json.loads(sbom.read_text())
    if (document["bomFormat"], document["specVersion"]) != ("CycloneDX", "1.6"):
        raise ReleaseError(f"{sbom.name} is not CycloneDX 1.6")
    entries = re.findall(r"^([\w.-]+)==(\S+) ; (.*)$", lock.read_text(), re.M)
    linux = {(name, version) for name, version, marker in entries if "linux" in marker}
    linux.add(("kfp-ddp", __version__))
    listed = [(one["name"], one["version"]) for one in document["components"]]
    names = sorted(name for name, _ in listed)
    if names != sorted({name for name, _ in linux}) or not {*listed} <= linux:
        raise ReleaseError(f"{sbom.name} and {lock} differ by {sorted({*listed} ^ linux)[:5]}")
