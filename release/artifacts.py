"""What a release consists of, besides the images: packages, bills of materials, pipelines."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from kfp_ddp import __version__
from kfp_ddp.export.provenance import library
from kfp_ddp.pipelines import NAMES

ROOT = Path(__file__).parents[1]
LOCKED = ("launcher", "server", "trainer")
SUMS = "SHA256SUMS"
BY_DIGEST = re.compile(r"[a-z0-9./:_-]+/(launcher|trainer)@sha256:[0-9a-f]{64}")
PLATFORMS = [
    {
        "sys_platform": "linux",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
    }
    for machine in ("x86_64", "aarch64")
]
PYTHON = re.compile(r"python:((\d+\.\d+)\.\d+)-slim")
"""The base of all images."""


class ReleaseError(Exception):
    """A release that is not as it should be."""


def notes(tag: str = "") -> str:
    """Return the newest section of the CHANGELOG; raise ReleaseError if it is of another version.

    A tag must be that of the package's version.
    """
    if tag and tag != f"v{__version__}":
        raise ReleaseError(f"tag {tag} is not v{__version__}, the version of kfp_ddp/__init__.py")
    _, section, *_ = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    title, _, text = section.partition("\n")
    if title.split()[0] != __version__:
        raise ReleaseError(f"CHANGELOG.md begins with {title!r}: add a section {__version__}")
    return text.strip()


def packages(out: Path) -> None:
    """Build sdist and wheel; equal commits give equal bytes."""
    run("-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", str(out), str(ROOT))


def run(*arguments: str, **environment: str) -> str:
    """Return what a Python program prints; raise CalledProcessError if it fails."""
    date = ["git", "log", "-1", "--format=%ct"]
    epoch = subprocess.run(date, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    env = {**os.environ, "SOURCE_DATE_EPOCH": epoch.strip(), **environment}
    done = subprocess.run(
        [sys.executable, *arguments], env=env, check=True, capture_output=True, text=True
    )
    return done.stdout


def sboms(out: Path) -> None:
    """Write a bill of materials in the format CycloneDX 1.6 for the lock of each image."""
    out.mkdir(parents=True, exist_ok=True)
    for name in LOCKED:
        lock = ROOT / "images" / name / "requirements.lock"
        document: dict[str, Any] = {
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {
                "component": {"type": "container", "name": name, "version": __version__},
                "properties": [{"name": "kfp-ddp:lock_sha256", "value": sha256(lock)}],
            },
            "components": [library("kfp-ddp", __version__), *locked(lock)],
        }
        (out / f"{name}.cdx.json").write_text(json.dumps(document, indent=1) + "\n")


def locked(lock: Path) -> list[dict[str, Any]]:
    """Return the packages of a lock that are installed in its image."""
    version = PYTHON.search((lock.parent / "Dockerfile").read_text())
    assert version is not None
    python = {"python_full_version": version[1], "python_version": version[2]}
    text = re.sub(r" \\\n +--hash=\S+", "", lock.read_text())
    found = []
    for line in filter(None, text.splitlines()):
        one = Requirement(line)
        if one.marker is None or any(one.marker.evaluate(at | python) for at in PLATFORMS):
            found.append(library(one.name, str(one.specifier).removeprefix("==")))
    return found


def pipelines(out: Path, images: Sequence[str]) -> None:
    """Compile the pipelines for images by digest."""
    flags = [f"--{name}-image={image}" for name, image in by_name(images).items()]
    run("-m", "kfp_ddp", "compile", "--output", str(out / "compiled"), *flags)


def by_name(images: Sequence[str]) -> dict[str, str]:
    """Return launcher and trainer by name; raise ReleaseError if they are not given by digest."""
    named = {match[1]: match[0] for match in map(BY_DIGEST.fullmatch, images) if match}
    if len(images) != 2 or len(named) != 2:
        raise ReleaseError(f"give launcher and trainer as HOST/NAME@sha256:..., not {images}")
    return named


def sums(out: Path) -> None:
    """Write the digests of all files."""
    lines = [f"{sha256(path)}  {path.relative_to(out)}\n" for path in files(out)]
    (out / SUMS).write_text("".join(lines))


def files(out: Path) -> list[Path]:
    """Return the files of a release without that of the digests."""
    return sorted(path for path in out.rglob("*") if path.is_file() and path.name != SUMS)


def expected() -> set[str]:
    """Return the names of all files of a release without that of the digests."""
    return {
        f"kfp_ddp-{__version__}-py3-none-any.whl",
        f"kfp_ddp-{__version__}.tar.gz",
        *(f"{name}.cdx.json" for name in LOCKED),
        *(f"compiled/{name}.yaml" for name in NAMES),
    }


def sha256(path: Path) -> str:
    """Return the digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
