"""Local package indexes: of two packages, kfpddp-one needs kfpddp-two and PyYAML, and of our locks.

python -m tests.package_index FOLDER [PACKAGE...]    downloads these packages with what they need;
without any, what the locks of the images name, but torch: all of them as wheels
"""

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from kfp_ddp.core.container_images import KINDS, lock_of
from kfp_ddp.jobs.shipping.worker_start import BY_HASH, WITH_TORCH


def index(folder: Path) -> str:
    """Create the index in a folder, with versions 1.0 and 2.0, and return its address."""
    needs = {"one": ["kfpddp-two", f"pyyaml=={version('pyyaml')}"], "two": []}
    for name, requires in needs.items():
        page = folder / "simple" / f"kfpddp-{name}" / "index.html"
        page.parent.mkdir(parents=True)
        links = []
        for number in ("1.0", "2.0"):
            content = f"SAY = '{name} {number}'\n"
            if name == "one":
                content = f"import kfpddp_two\n{content}"
            file = wheel(folder, f"kfpddp_{name}", number, content, requires)
            links.append(f'<a href="../../{file.name}#sha256={digest(file)}">{file.name}</a>')
        page.write_text("\n".join(links))
    return (folder / "simple").as_uri()


def serve_uv(folder: Path) -> list[str]:
    """Put the uv of this environment on the index of a folder; return its lock."""
    program = Path(sys.prefix) / "bin" / "uv"
    if not program.exists():
        pytest.skip(f"no {program}: there is no wheel of uv for this machine")
    name = f"uv-{version('uv')}"
    meta = f"{name}.dist-info"
    file = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(program, f"{name}.data/scripts/uv")
        archive.writestr(
            f"{meta}/METADATA", f"Metadata-Version: 2.1\nName: uv\nVersion: {version('uv')}\n"
        )
        archive.writestr(
            f"{meta}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{meta}/RECORD", f"{name}.data/scripts/uv,,\n{meta}/RECORD,,\n")
    add(file, folder)
    return [f"uv=={version('uv')} --hash=sha256:{digest(file)}"]


def download(folder: Path, packages: list[str]) -> None:
    """Create the index of packages, or of those of launcher and trainer, in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)]
    if packages:
        subprocess.run([*pip, *packages], check=True)
    for kind in () if packages else (*KINDS, "uv"):
        text = lock_of(kind).read_text()
        pins = [pin for pin in re.split(r"^(?=\w)", text, flags=re.M) if not WITH_TORCH.match(pin)]
        (lock := folder / f"{kind}.lock").write_text("".join(pins))
        subprocess.run([*pip, *BY_HASH, "--requirement", str(lock)], check=True)
    shutil.rmtree(folder / "simple", ignore_errors=True)
    for file in folder.glob("*.*"):
        if file.suffix in (".whl", ".gz"):
            add(file, folder)


def add(file: Path, folder: Path) -> None:
    """Add a file of a folder to its index."""
    name = re.sub(r"[-_.]+", "-", re.split(r"-\d", file.name)[0]).lower()
    page = folder / "simple" / name / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    with page.open("a") as links:
        links.write(f'<a href="../../{file.name}#sha256={digest(file)}">{file.name}</a>\n')


def wheel(folder: Path, name: str, number: str, content: str, requires: list[str]) -> Path:
    """Create a wheel of one module."""
    file = folder / f"{name}-{number}-py3-none-any.whl"
    meta, info = f"{name}-{number}.dist-info", [f"Name: {name}", f"Version: {number}"]
    info += [f"Requires-Dist: {each}" for each in requires]
    files = {
        f"{name}.py": content,
        f"{meta}/METADATA": "\n".join(["Metadata-Version: 2.1", *info, ""]),
        f"{meta}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{meta}/RECORD"))
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in {**files, f"{meta}/RECORD": record}.items():
            archive.writestr(path, text)
    return file


def digest(file: Path) -> str:
    """Return the hash of a file for a lock file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    download(Path(sys.argv[1]), sys.argv[2:])
