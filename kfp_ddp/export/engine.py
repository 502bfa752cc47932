"""The export step: make a bundle from a checkpoint and its evaluation."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import read_below, sha256, sha256_of_json
from kfp_ddp.core.log import log
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.settings import mapping_of
from kfp_ddp.core.step import Artifact, step, write_artifact
from kfp_ddp.datasets.access import local_dataset, using
from kfp_ddp.models import bundle, variants
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.models.release import Variants, check_model_name, part_of
from kfp_ddp.runs.workspace import open_workspace
from kfp_ddp.training.spec.manifest import read_manifest, step_dir

WEIGHTS = step_dir(Path(RunFolder.CHECKPOINTS), 0).as_posix()
"""In a run's folder: the checkpoint of a network that was trained elsewhere."""
_FORMAT = 2  # of the bundle; existing bundles of another format are not reused


@step
def run(
    *,
    checkpoint: str,
    run_dir: str,
    dataset_path: str,
    evaluation: str,
    model_name: str,
    split: str,
    release: Mapping[str, Any],
    exported_model: Artifact,
    export_summary: Artifact,
) -> str:
    """Make the bundle and fill the artifacts; return its folder."""
    started = time.monotonic()
    check_model_name(model_name)
    requested = part_of(release, Variants)
    run_dir = run_dir or evaluation.rsplit("/", 2)[0]
    with (
        open_workspace(run_dir, "export") as task,
        local_dataset(dataset_path, task.path) as data,
        using("export", run_dir, data),
    ):
        task.download_below(f"{bundle.NAME}/")
        folder = make(
            task.download(checkpoint or f"{run_dir}/{WEIGHTS}"),
            task.path,
            data / split,
            task.download_file(evaluation),
            model_name,
            requested,
        )
        uri = task.to_uri(folder)
        _report(folder, uri, model_name, exported_model, export_summary)
    log.info(f"exported {model_name} to {uri} in {time.monotonic() - started:.1f} s")
    return uri


def make(
    checkpoint: Path,
    run_dir: Path,
    split: Path,
    evaluation: Path,
    model_name: str,
    requested: Variants = Variants(),  # noqa: B008
) -> Path:
    """Make `<run_dir>/bundle`, unless one of the same inputs is intact; return it.

    The formats are compared on images of `split`, `<dataset>/<name>`. Raise KfpDdpError.
    """
    result = _read_evaluation(evaluation, checkpoint)
    inputs: dict[str, Any] = {
        "format": _FORMAT,
        "checkpoint": result.checkpoint_digest,
        "evaluation": sha256(evaluation),
        "model_name": model_name,
        "torch": version("torch"),
        **requested.explicit(),
    }
    key = sha256_of_json(inputs)  # while it is unchanged, the bundle is reused
    target = run_dir / bundle.NAME
    bundle.clean_up(run_dir)
    with suppress(OSError, ValueError, KeyError, TypeError):  # no bundle, or a damaged one
        config = json.loads(read_below(target, bundle.CONFIG, bundle.LARGEST_CONFIG))
        if config["export"]["key"] == key and bundle.intact(target):
            return target
    # The import of torch takes seconds.
    from kfp_ddp.export import contents

    with bundle.replacing(run_dir) as folder:
        export = {"made_of": inputs, "key": key}
        contents.write(folder, checkpoint, split, evaluation, model_name, requested, export)
    return target


def _read_evaluation(evaluation: Path, checkpoint: Path) -> Evaluation:
    """Return the evaluation, if it is complete and of this checkpoint."""
    if not checkpoint.is_dir():
        raise InputError(
            f"there is no checkpoint {checkpoint}: give the step folder that train returned"
        )
    result = Evaluation.read(evaluation)
    if not (evaluation.parent / result.predictions).is_file():
        raise InputError(
            f"there is no {evaluation.parent / result.predictions}: it belongs to the evaluation, "
            "run evaluate again"
        )
    try:
        digest = read_manifest(checkpoint).digest
    except (OSError, ValueError) as error:
        raise InputError(
            f"{checkpoint} is not a complete checkpoint: {error}; use another or train again"
        ) from None
    if digest != result.checkpoint_digest:
        raise InputError(
            f"{evaluation} is of another checkpoint ({result.checkpoint_digest[:12]}) than "
            f"{checkpoint} ({digest[:12]}): evaluate this one first"
        )
    return result


def _report(folder: Path, uri: str, model_name: str, model: Artifact, summary: Artifact) -> None:
    """Fill the artifacts from the files of the bundle, which may be a reused one."""
    from kfp_ddp.export import card

    facts = card.metadata(folder, model_name, uri)
    write_artifact(model, json.dumps(facts, indent=1) + "\n", **facts)
    sizes = {name: (folder / name).stat().st_size for name in facts["formats"].split(", ")}
    parity, latency = (mapping_of(folder / name) for name in (bundle.PARITY, bundle.LATENCY))
    fact = f"{uri}, digest {facts['digest']}"
    record = variants.read(bundle.local_bundle(folder))
    write_artifact(summary, card.markdown(model_name, fact, sizes, parity, latency, record))
