"""The child process of a local run: a compiled pipeline through kfp.local, with its log on stdout.

Prerequisite: the `local` extra. `python -m kfp_ddp.local.pipeline ARGUMENTS_JSON ROOT [YAML]`.
"""

import json
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import kfp_ddp
from kfp_ddp.local import warm

COMPILED = Path(kfp_ddp.__file__).parent / "compiled" / "train_resnet.yaml"
TORCH_STEPS = ("train", "evaluate", "export")


def run(arguments: dict[str, object], pipeline_root: str, compiled: Path = COMPILED) -> None:
    """Run a compiled pipeline in subprocesses of this one.

    Raises:
        RuntimeError: A step failed.
    """
    import yaml
    from kfp import components, local

    vars(yaml)["SafeLoader"] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster
    # The steps run in this Python, with any image and without a cluster.
    warnings.filterwarnings("ignore", message="You may be attemping", category=RuntimeWarning)
    warnings.filterwarnings("ignore", message=r"Task '.*': settings .* have no effect")
    text = compiled.read_text(encoding="utf-8")
    imports_torch = any(f"comp-{name}:" in text for name in TORCH_STEPS)
    with warm.python() if imports_torch else nullcontext():
        # kfp would create a folder in /tmp for each run, and never remove it.
        workspace = f"{pipeline_root}/.workspace"
        local.init(local.SubprocessRunner(use_venv=False), pipeline_root, workspace)
        components.load_component_from_file(str(compiled))(**arguments)


if __name__ == "__main__":
    run(json.loads(sys.argv[1]), sys.argv[2], *map(Path, sys.argv[3:]))
