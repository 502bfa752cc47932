"""The `preflight` step: the checks of the steps that follow, all at once and first."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.data_sync.dataset import dataset_name
from kfp_ddp.components.data_sync.settings import options_of
from kfp_ddp.components.data_sync.sources import open_source
from kfp_ddp.components.dataset_volume.publish import check_strategy
from kfp_ddp.components.export.bundle import check_model_name
from kfp_ddp.components.gate.rules import Rules
from kfp_ddp.components.shared import champion as champions
from kfp_ddp.components.shared.cluster.api import Api
from kfp_ddp.components.shared.destination import Bucket, place
from kfp_ddp.components.shared.launch import check_job as preflight
from kfp_ddp.components.shared.launch.manifests.specification import LaunchSpec
from kfp_ddp.components.shared.step import step
from kfp_ddp.components.teardown.engine import check_keep
from kfp_ddp.components.train import settings
from kfp_ddp.training.config import TrainConfig

if TYPE_CHECKING:
    from kfp import dsl


@step
def run(
    *,
    summary: "dsl.Markdown",
    source: str,
    dataset: str,
    sync: Mapping[str, object],
    claims: Mapping[str, str],
    publish: str,
    backend: str,
    nproc_per_node: int,
    cluster: Mapping[str, Any],
    more_cluster: Mapping[str, Any],
    training: Mapping[str, Any],
    more_training: Mapping[str, Any],
    rules: Mapping[str, float],
    champion: str,
    model_name: str,
    destination: str,
    keep_runs: int,
) -> str:
    """Check all, write what will run, and return it in one line.

    Raises:
        InputError: the first parameter that cannot be used, in the order of the steps.
    """
    open_source(source)
    _check_sync(dataset, source, sync)
    check_strategy(publish, source)
    job = settings.of_job(cluster, more_cluster)
    settings.check_backend(backend, nproc_per_node, int(job["nodes"]))
    config = TrainConfig.create(**settings.of_training(training, more_training))
    Rules.create(**rules).check_champion(champion)
    check_model_name(model_name)
    check_keep(keep_runs)
    # A folder lies on a claim, which on a cluster is not mounted here.
    mounted = all(Path(folder).is_dir() for folder in claims)
    if champion and (mounted or isinstance(place(champion), Bucket)):
        champions.find(champion)
    where = place(destination) if destination else None
    if isinstance(where, Bucket):
        where.prepare()
    if backend == "local":
        warnings = _in_this_image()
    else:
        warnings = _on_cluster(backend, nproc_per_node, job, claims)
    what = _in_words(config, backend, job)
    for warning in warnings:
        print(f"warning: {warning}", flush=True)
    text = [f"**{what}**", "", *(f"- warning: {warning}" for warning in warnings)]
    Path(summary.path).write_text("\n".join(text) + "\n", encoding="utf-8")
    print(what, flush=True)
    return what


def _in_this_image() -> list[str]:
    """Warnings about processes of the step itself, whose image is as a rule that of this step."""
    if importlib.util.find_spec("torch"):
        return []
    return [
        "backend=local trains in the step's own container, and this image has no torch: use "
        "pytorchjob or trainjob, or set_container_image of the trainer on the task train"
    ]


def _check_sync(dataset: str, source: str, sync: Mapping[str, object]) -> None:
    """Refuse what data_sync would, and what leaves the steps after it without files.

    Raises:
        InputError: naming the parameter.
    """
    options = options_of(dataset_name(dataset, source), {}, sync)
    if options.dry_run:
        raise InputError("sync sets dry_run, which leaves nothing to train on; leave it out")
    if options.pack != "none":
        raise InputError(f"sync sets pack to {options.pack!r}; training reads files, leave it out")


def _on_cluster(
    backend: str, nproc_per_node: int, job: Mapping[str, Any], claims: Mapping[str, str]
) -> list[str]:
    """Warnings about the job; it is the one that `train` creates, but for its command."""
    given = {path: claim for path, claim in claims.items() if claim}
    fields = {**job, "kind": backend, "nproc_per_node": nproc_per_node, "command": ["true"]}
    fields["claims"] = {**given, **job.get("claims", {})}
    return preflight.check(Api.connect(), LaunchSpec.create(**fields))


def _in_words(config: TrainConfig, backend: str, job: Mapping[str, Any]) -> str:
    """What will run, in one line."""
    batch = f"batch {config.batch_size}"
    if config.batch_size_per_rank:
        batch = f"batch {config.batch_size_per_rank} a rank"
    where = backend
    if backend != "local":
        gpus = int(job["gpus_per_node"])
        where += f" of {int(job['nodes'])} pod(s), {gpus or 'no'} GPU(s) each"
    return f"{config.model} at {config.image_size} px, {config.epochs} epochs, {batch}, {where}"
