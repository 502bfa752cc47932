"""The publish step: seal, sign, upload and register a blessed bundle; make it the champion."""

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.core.files import atomic_write, link_or_copy
from kfp_ddp.core.log import log
from kfp_ddp.core.outputs import PublishFacts
from kfp_ddp.core.run_folder import EXPORTED, MLFLOW, REPORT, VERDICT
from kfp_ddp.core.settings import mapping_of
from kfp_ddp.core.step import Artifact, step, write_artifact
from kfp_ddp.core.text import cell, from_json
from kfp_ddp.export import card
from kfp_ddp.k8s.api import Api
from kfp_ddp.models import attempts
from kfp_ddp.models import bundle as bundles
from kfp_ddp.models.bundle import LINEAGE, PUBLISHED
from kfp_ddp.models.champion import compared_with, history, move, replaced_by
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.models.registry import Registry, registry_of
from kfp_ddp.models.release import (
    MODELS,
    Deployment,
    Registering,
    Signing,
    check_model_name,
    part_of,
)
from kfp_ddp.models.signature import fingerprint, key_of, sign
from kfp_ddp.rollout.rollout import versions_in_service
from kfp_ddp.runs.workspace import RunWorkspace, open_workspace
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store
from kfp_ddp.training.report import trackers


class Lineage(NamedTuple):
    """The run that published a bundle, and the champion that it was compared with."""

    run_id: str = ""
    champion: str = ""
    """URI of the model that it was compared with."""
    champion_version: str = ""
    """Version of that model; '' for none."""
    mlflow_run_id: str = ""
    """Run of MLflow with the curves of its training; '' for none."""

    def record(self, dataset_digest: str) -> dict[str, str]:
        """Return the content of `LINEAGE`, with the current time."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return {**self._asdict(), "dataset_digest": dataset_digest, "exported_at": now}


@step
def run(
    *,
    bundle: str,
    evaluation: str,
    model_name: str,
    destination: str,
    champion: str,
    champion_version: str,
    release: Mapping[str, Any],
    attempt: str,
    keep: int,
    run_id: str,
    published_model: Artifact,
    publish_summary: Artifact,
) -> tuple[str, str]:
    """Publish the bundle, fill the artifacts; return the uploaded URI, or '', and its version."""
    for part in MODELS:
        part_of(release, part)
    key = key_of(part_of(release, Signing))
    check_model_name(model_name)
    where: Store | None = None
    expected = ""
    if destination:
        where = open_store(destination)
        where.prepare()
        expected = compared_with(champion, champion_version, where, model_name)
    registry = registry_of(part_of(release, Registering), where)
    with open_workspace(bundle.rpartition("/")[0], "publish") as task:
        mlflow_run_id = str(mapping_of(task.path / MLFLOW).get("run_id", ""))
        lineage = Lineage(run_id, champion, champion_version, mlflow_run_id)
        folder = _decided(task, bundle, evaluation, lineage)
        task.upload()  # first, so that a repeated step publishes the same bundle
        if key is not None:
            sign(folder, key)
        uri = ""
        reason = ""
        version = bundles.version(folder)
        if where is not None:
            uri, reason = publish(folder, model_name, where, expected, run_id, registry)
            if attempt and not reason:
                models = open_store(f"{where.uri}/{model_name}")
                _note(models, attempt, version, expected)
                if keep:
                    _prune(models, keep, part_of(release, Deployment).service)
            if registry is not None:
                registry.agree(where, model_name)
        facts: PublishFacts = {
            **card.metadata(folder, model_name, uri or bundle),
            "version": version,
            "run_id": run_id,
            "champion_version": champion_version,
            "champion": bool(uri) and not reason,
            "champion_stays": reason,
            "signed_by": fingerprint(key.public_key()) if key is not None else "",
            "registry": registry.address if registry is not None and uri else "",
        }
        _report(folder.parent, facts, published_model, publish_summary)
    log.info(f"published {model_name} {version}: {facts['uri']}")
    if reason:
        log.info(reason)
    return uri, version


def _decided(task: RunWorkspace, bundle: str, evaluation: str, lineage: Lineage) -> Path:
    """Download a bundle and add its lineage, with an evaluation also the verdict beside that."""
    folder = task.download(bundle)
    if not evaluation:
        return add_decision(folder, lineage, None)
    beside = task.download_file(evaluation).parent
    _check_verdict(beside / VERDICT, folder)
    return add_decision(folder, lineage, beside)


def _note(models: Store, attempt: str, version: str, expected: str) -> None:
    """Record the attempt that made a version the champion in the place of `expected`."""
    if expected == version:  # published by an interrupted attempt of this step
        expected = replaced_by(history(models), version) or ""
    attempts.note(models, attempt, version=version, champion=expected, reason="blessed")


def _check_verdict(verdict: Path, folder: Path) -> None:
    """Raise InputError unless the gate's verdict in a file blesses this bundle."""
    try:
        record = from_json(verdict.read_text(encoding="utf-8"))
        blessed = bool(record["blessed"])
        reason = str(record["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"there is no verdict {verdict}: run gate before publish, on this evaluation"
        ) from None
    if not blessed:
        raise InputError(f"the gate did not bless this model, so it is not published: {reason}")
    own = bundles.local_bundle(folder, sealed=False)  # an upload may be incomplete
    metrics = own.listed.get(bundles.METRICS, "")
    for name, value in (("evaluation_sha256", metrics), ("bundle", own.exported_version)):
        if record.get(name, "") not in ("", value):
            raise InputError(
                f"{verdict} is of another {name.partition('_')[0]} than {folder}: run gate again, "
                "on the one that was exported"
            )


def add_decision(folder: Path, lineage: Lineage, evaluation: Path | None) -> Path:
    """Replace a complete bundle by one with verdict, report and lineage, unless it has them.

    `evaluation` is the folder with the verdict and perhaps a report. Return the bundle's folder.
    """
    bundles.clean_up(folder.parent)
    complete = bundles.intact(folder)
    # An interrupted upload to a bucket may have replaced some of our files.
    if not complete and not bundles.intact(folder, but=PUBLISHED):
        raise InputError(f"{folder} is no complete bundle: run export again")
    decision: list[Path] = []
    if evaluation is not None:
        added = (evaluation / name for name in (VERDICT, REPORT))
        decision = [path for path in added if path.is_file()]
    same_files = all(_has_content(folder / path.name, path.read_bytes()) for path in decision)
    same_run = lineage._asdict().items() <= mapping_of(folder / LINEAGE).items()
    has_all = same_files and same_run
    if complete and has_all:
        return folder
    dataset_digest = Evaluation.read(folder / bundles.METRICS).dataset_digest
    skipped = {bundles.MANIFEST, bundles.SUCCESS, *PUBLISHED}
    with bundles.replacing(folder.parent) as target:
        for name in bundles.files(folder):
            if name not in skipped:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(folder / name, target / name)
        for path in decision:
            shutil.copyfile(path, target / path.name)
        bundles.write_json(target / LINEAGE, lineage.record(dataset_digest))
    return folder


def _has_content(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def publish(
    folder: Path,
    name: str,
    where: Store,
    expected: str,
    run_id: str = "",
    registry: Registry | None = None,
) -> tuple[str, str]:
    """Upload a bundle; make it the champion if that is still `expected`, the version compared with.

    Return the URI, and why it is not the champion, '' if it is; `registry` gets the version before.
    """
    uri = bundles.upload(folder, name, where)
    version = bundles.version(folder)
    if registry is not None:
        registry.register(where, name, version)
    current = move(where, name, version, expected, run_id)
    if current == version:
        return uri, ""
    return uri, (
        f"{version} was uploaded, but {expected or 'none'}, which it was compared with, is not the "
        f"champion any more: CHAMPION names {current or 'none'} and does not move; run the gate "
        "again"
    )


def _prune(models: Store, keep: int, service: str) -> None:
    """Delete the bundles of old attempts, except those in service."""
    try:
        keep_also = versions_in_service(Api.connect()) if service else ()
    except KfpDdpError as error:
        log.info(f"no bundle was deleted: {error}")
        return
    deleted = attempts.prune(models, keep, keep_also)
    if deleted:
        log.info(f"deleted {len(deleted)} old bundle(s): {', '.join(deleted)}")


def _report(run_dir: Path, facts: PublishFacts, model: Artifact, summary: Artifact) -> None:
    """Fill the artifacts, and write the same for later steps and trackers."""
    text = json.dumps(facts, indent=1) + "\n"
    write_artifact(model, text, **facts)
    with atomic_write(run_dir / EXPORTED, run_dir / f".{EXPORTED}.tmp") as file:
        file.write(text.encode())
    tags = {
        "kfp_ddp.bundle.uri": facts["uri"],
        "kfp_ddp.bundle.digest": facts["digest"],
        "kfp_ddp.bundle.champion": str(facts["champion"]),
    }
    trackers.note(run_dir, {}, tags)
    lines = [f"## {facts['name']} {facts['version']}", "", cell(facts["uri"]), ""]
    if facts["champion_stays"]:
        lines += [cell(facts["champion_stays"]), ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {key} | {cell(str(value))} |" for key, value in facts.items() if value != ""]
    write_artifact(summary, "\n".join(lines) + "\n")
