"""Settings that come as mappings, laid over a step's own inputs without losing either unseen."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.shared.launch.manifests.specification import LaunchSpec
from kfp_ddp.training.config import TrainConfig

BACKENDS = ("pytorchjob", "trainjob", "local")
_JOB_OWN = frozenset({"kind", "command", "args", "script", "nproc_per_node", "metrics_port"})
_TRAINING_OWN = frozenset({"data", "output_dir", "run_id", "stop_when_stale", "stale_seconds"})


def of_job(inputs: Mapping[str, Any], cluster: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of LaunchSpec: the step's inputs, overlaid with what `cluster` names.

    Raises:
        InputError: `cluster` names what the step sets itself, or an input that is set otherwise.
    """
    return _over("cluster", LaunchSpec, _JOB_OWN, inputs, cluster)


def of_training(inputs: Mapping[str, Any], training: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of TrainConfig: the step's inputs, overlaid with what `training` names.

    Raises:
        InputError: `training` names what the step sets itself, or an input that is set otherwise.
    """
    return _over("training", TrainConfig, _TRAINING_OWN, inputs, training)


def _over(
    what: str,
    model: type[BaseModel],
    own: frozenset[str],
    inputs: Mapping[str, Any],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    for name, value in given.items():
        if name in own:
            raise InputError(f"{what} sets {name}, which the step sets from its own inputs")
        if name not in inputs or inputs[name] == value:
            continue
        if inputs[name] != model.model_fields[name].default:
            raise InputError(
                f"{name} is given twice: {inputs[name]!r} as an input and {value!r} in {what}; "
                "leave one out"
            )
    return {**inputs, **given}


def check_backend(backend: str, nproc_per_node: int, nodes: int) -> None:
    """Refuse what no backend can do.

    Raises:
        InputError: an unknown backend, a negative number of ranks, several nodes of one machine.
    """
    if backend not in BACKENDS:
        raise InputError(f"backend {backend!r} is not known; use one of {', '.join(BACKENDS)}")
    if nproc_per_node < 0:
        raise InputError(f"nproc_per_node={nproc_per_node}: use 0 (one for each GPU) or more")
    if backend == "local" and nodes != 1:
        raise InputError(f"nodes={nodes}: backend local has one node; use pytorchjob or trainjob")
