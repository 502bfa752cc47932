"""Complete checkpoints without a training."""

import json
from pathlib import Path

from kfp_ddp.core.files import sha256, sha256_of_json
from kfp_ddp.training.spec.manifest import DIGEST, MANIFEST, STATE, step_dir


def save(run_dir: Path, step: int, content: bytes = b"", **fields: object) -> Path:
    """Write a checkpoint with any content, which appears at once as in a training."""
    target = step_dir(run_dir / "checkpoints", step)
    folder = target.with_suffix(".tmp")
    folder.mkdir(parents=True)
    (folder / STATE).write_bytes(content or f"state {step}".encode())
    about = {"size": (folder / STATE).stat().st_size, "sha256": sha256(folder / STATE)}
    manifest = {"step": step, "files": {STATE: about}, **fields}
    (folder / MANIFEST).write_text(json.dumps({**manifest, DIGEST: sha256_of_json(manifest)}))
    return folder.rename(target)
