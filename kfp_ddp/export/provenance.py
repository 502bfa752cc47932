"""Provenance of a bundle: a bill of materials in the format CycloneDX 1.6."""

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import kfp_ddp
from kfp_ddp import __version__
from kfp_ddp.core.files import sha256
from kfp_ddp.k8s.pods import record_images
from kfp_ddp.models.evaluation import Evaluation

_OURS = "kfp-ddp"
_REVISION = re.compile(r"[0-9a-f]{40,64}")


def record(folder: Path, model_name: str, result: Evaluation) -> dict[str, Any]:
    """Return the content of `bundle.PROVENANCE` for a bundle; equal inputs give equal bytes."""
    properties = {
        "checkpoint_sha256": result.checkpoint_digest,
        "dataset_digest": result.dataset_digest,
        "samples_digest": result.samples_digest,
        "revision": revision(),
        "source_sha256": source_digest(),
    }
    data = [{"type": "data", "name": "dataset", "version": result.dataset_digest}]
    files = [
        {"type": "file", "name": path.name, "hashes": [{"alg": "SHA-256", "content": sha256(path)}]}
        for path in sorted(folder.glob("model.*"))
    ]
    step = [  # if a cluster reports it
        {"type": "container", "name": image["image"], "version": image["digest"]}
        for image in record_images()["step"]
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "tools": {
                "components": [{"type": "application", "name": _OURS, "version": __version__}]
            },
            "component": {
                "type": "machine-learning-model",
                "bom-ref": "model",
                "name": model_name,
                "description": f"{result.model}, step {result.step}",
                "hashes": [{"alg": "SHA-256", "content": result.checkpoint_digest}],
            },
            "properties": [
                {"name": f"{_OURS}:{name}", "value": value}
                for name, value in properties.items()
                if value
            ],
        },
        "components": [*(data if result.dataset_digest else ()), *files, *step, *packages()],
    }


def packages() -> list[dict[str, Any]]:
    """Return all installed packages, sorted."""
    versions = {}
    for distribution in metadata.distributions():
        facts = distribution.metadata
        name = re.sub(r"[-_.]+", "-", str(facts["Name"])).lower()
        versions[name] = facts["Version"]
    return [library(name, version) for name, version in sorted(versions.items())]


def library(name: str, version: str) -> dict[str, Any]:
    """Return a package of Python as a component."""
    purl = f"pkg:pypi/{name}@{version}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def revision() -> str:
    """Return the git revision of the code, with `-dirty` if it is changed; '' if unknown."""
    return (os.environ.get("KFP_DDP_REVISION") or _installed_from() or _checked_out()).strip()


def _installed_from() -> str:
    """Return the commit that pip recorded (PEP 610)."""
    try:
        record = metadata.distribution(_OURS).read_text("direct_url.json")
        return str(json.loads(record or "{}").get("vcs_info", {}).get("commit_id", ""))
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        return ""


@functools.cache
def _checked_out() -> str:
    root = Path(kfp_ddp.__file__).resolve().parents[1]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return ""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        return ran.stdout.strip() if ran.returncode == 0 else ""

    commit = git("rev-parse", "HEAD")
    if not _REVISION.fullmatch(commit):
        return ""
    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changed else commit


@functools.cache
def source_digest() -> str:
    """Return the SHA-256 of names and contents of the package's Python files."""
    root = Path(kfp_ddp.__file__).parent
    total = hashlib.sha256()
    names = sorted(
        os.path.relpath(os.path.join(folder, name), root)
        for folder, _, files in os.walk(root, followlinks=True)
        for name in files
        if name.endswith(".py")
    )
    for name in names:
        total.update(f"{name}\0{sha256(root / name)}\n".encode())
    return total.hexdigest()
