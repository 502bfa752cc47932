"""An installation as files to keep in git, which kubectl, Argo CD or Flux apply."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kfp_ddp.core.errors import InputError
from kfp_ddp.k8s.api import Object

HEADER = "# Written by `kfp-ddp install --print`, which replaces it.\n"
KUSTOMIZATION = "kustomization.yaml"
NAMES = {"ConfigMap": "source"}
"""Name of the file of a kind, where it is another one."""
KEPT = """\
# Nobody prunes the datasets, nor the source of a version whose runs are in progress.
patches:
  - target: {kind: PersistentVolumeClaim|ConfigMap}
    patch: |-
      apiVersion: v1
      kind: any
      metadata:
        name: any
        annotations:
          argocd.argoproj.io/sync-options: Prune=false,Delete=false
          kustomize.toolkit.fluxcd.io/prune: disabled
"""


class Written(NamedTuple):
    """What was written."""

    sizes: dict[str, int]
    """Bytes of each file by its name."""
    once: list[str]
    """Files that are applied once, beside the kustomization."""


def write(objects: Sequence[Object], once: Sequence[Object], folder: Path) -> Written:
    """Write a file for each kind, and a kustomization of all but `once`.

    A tool that corrects drift would run those again. InputError for a file of others.
    """
    import yaml

    texts = _by_file(objects)
    beside = _by_file(once)
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [*texts],
    }
    texts |= beside
    texts[KUSTOMIZATION] = yaml.safe_dump(kustomization, sort_keys=False) + KEPT
    for name in texts:
        _check_is_ours(folder / name)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {name: (folder / name).write_text(HEADER + text) for name, text in texts.items()}
    return Written(sizes, [*beside])


def _by_file(objects: Sequence[Object]) -> dict[str, str]:
    import yaml

    texts: dict[str, str] = {}
    for one in objects:
        kind = one["kind"]
        name = f"{NAMES.get(kind, kind.lower())}.yaml"
        document = yaml.safe_dump(one, sort_keys=False, explicit_start=True)
        texts[name] = texts.get(name, "") + document
    return texts


def _check_is_ours(path: Path) -> None:
    if path.exists() and not path.read_text(errors="replace").startswith(HEADER):
        raise InputError(f"{path} is not of `kfp-ddp install --print`: name an empty folder")
