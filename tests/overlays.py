"""The overlay of deploy/README.md, for a checkout in place of the tag that it names."""

import os
import re
from pathlib import Path

import yaml

from tests.commands import output

DEPLOY = Path(__file__).parents[1] / "deploy"
ADDRESS = "https://github.com/kfp-ddp/kfp-ddp//deploy"


def write_overlay(folder: Path, namespace: str, left_out: tuple[str, ...] = ()) -> None:
    """Write it with the files that it names; `left_out` are components."""
    text = (DEPLOY / "README.md").read_text()
    (block,) = re.findall(r"```yaml\n# kustomization.yaml\n(.*?)```", text, re.S)
    overlay = yaml.safe_load(block)
    overlay["namespace"] = namespace
    here = os.path.relpath(DEPLOY.resolve(), folder.resolve())
    for part in ("resources", "components"):
        names = [name.partition("?")[0].replace(ADDRESS, here) for name in overlay[part]]
        overlay[part] = [name for name in names if not name.endswith(left_out or "?")]
    output("install", "--print", folder / "printed", "-n", namespace)
    (folder / "source.yaml").write_bytes((folder / "printed" / "source.yaml").read_bytes())
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
