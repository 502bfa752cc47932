"""The child process of a run here: the compiled YAML through kfp.local, its log on stdout."""

import json
import sys
import warnings
from pathlib import Path

import kfp_ddp
from kfp_ddp.local import warm

COMPILED = Path(kfp_ddp.__file__).parent / "compiled" / "train_resnet.yaml"


def run(arguments: dict[str, object], pipeline_root: str, compiled: Path = COMPILED) -> None:
    """Run a compiled pipeline in subprocesses of this one.

    Raises:
        RuntimeError: when a step failed.
    """
    with warm.python(warm.stages_of(compiled)):
        _run(arguments, pipeline_root, compiled)


def _run(arguments: dict[str, object], pipeline_root: str, compiled: Path) -> None:
    import yaml
    from kfp import components, local

    # The same in C: the pipeline is read in a tenth of the time.
    vars(yaml)["SafeLoader"] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    # The steps run in this Python, whatever their image is called.
    warnings.filterwarnings("ignore", message="You may be attemping", category=RuntimeWarning)
    # What steps take of a cluster is nothing here.
    warnings.filterwarnings("ignore", message=r"Task '.*': settings .* have no effect")
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=pipeline_root)
    components.load_component_from_file(str(compiled))(**arguments)


if __name__ == "__main__":
    run(json.loads(sys.argv[1]), sys.argv[2], *map(Path, sys.argv[3:]))
