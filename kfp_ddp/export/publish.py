"""The publish step: seal, sign, upload and register a blessed bundle; make it the champion."""

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.core.files import atomic_write, link_or_copy
from kfp_ddp.core.run_folder import EXPORTED, REPORT, VERDICT
from kfp_ddp.core.step import step
from kfp_ddp.core.text import cell
from kfp_ddp.k8s.api import Api
from kfp_ddp.models import attempts
from kfp_ddp.models import bundle as bundles
from kfp_ddp.models.bundle import LINEAGE
from kfp_ddp.models.champion import compared_with, move
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.models.registry import Registry, registry_of
from kfp_ddp.models.release import MODELS, Deployment, Registering, Signing, part_of
from kfp_ddp.models.serving.rollout import in_service
from kfp_ddp.models.signature import fingerprint, key_of, sign
from kfp_ddp.runs.workspace import open_workspace
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store, sha256
from kfp_ddp.training import trackers

if TYPE_CHECKING:
    from kfp import dsl

_OURS = frozenset({LINEAGE, VERDICT, REPORT})
"""The files that publishing adds to a bundle."""


class Lineage(NamedTuple):
    """The run that published a bundle, and the champion that it was compared with."""

    run_id: str = ""
    champion: str = ""
    """URI of the model that it was compared with."""
    champion_version: str = ""
    """Version of that model; '' for none."""

    def record(self, dataset_digest: str) -> dict[str, str]:
        """Return the content of `LINEAGE`, with the current time."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return {**self._asdict(), "dataset_digest": dataset_digest, "exported_at": at}

    def is_in(self, folder: Path) -> bool:
        """Return whether a bundle has the same lineage, with any time."""
        try:
            record = json.loads((folder / LINEAGE).read_text(encoding="utf-8"))
            return {name: record[name] for name in self._fields} == self._asdict()
        except (OSError, ValueError, KeyError, TypeError):
            return False


class Published(NamedTuple):
    """URI of the uploaded bundle, or '', and its version."""

    destination: str
    version: str


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
    published_model: "dsl.Model",
    publish_summary: "dsl.Markdown",
) -> Published:
    """Publish the bundle and fill the artifacts."""
    for part in MODELS:
        part_of(release, part)
    key = key_of(part_of(release, Signing))
    registry = registry_of(part_of(release, Registering))
    where, expected = _target(destination, model_name, champion, champion_version)
    lineage = Lineage(run_id, champion, champion_version)
    with open_workspace(bundle.rpartition("/")[0], "publish") as task:
        folder, verdict, report = task.download(bundle), None, None
        if evaluation:
            beside = task.download_file(evaluation).parent
            verdict, report = _blessed(beside / VERDICT, folder), beside / REPORT
        folder = add_decision(folder, lineage, verdict, report)
        task.upload()  # first, so that a step that is run again publishes the same
        if key is not None:
            sign(folder, key)
        uri = stays = ""
        if where is not None:
            uri, stays = publish(folder, model_name, where, expected, run_id, registry)
            if attempt and not stays:
                models = open_store(f"{where.uri}/{model_name}")
                version = bundles.version(folder)
                attempts.note(models, attempt, version=version, champion=expected, reason="blessed")
                if keep:
                    _prune(models, keep, part_of(release, Deployment).service)
            if registry is not None:
                registry.agree(where, model_name)
        said = _described(folder, model_name, uri or bundle, lineage, stays)
        said["champion"] = bool(uri) and not stays
        said["signed_by"] = fingerprint(key.public_key()) if key is not None else ""
        said["registry"] = registry.address if registry is not None and uri else ""
        _tell(folder.parent, said, published_model, publish_summary)
    print(f"published {model_name} {said['version']}: {said['uri']}")
    if stays:
        print(stays)
    return Published(uri, said["version"])


def _target(
    destination: str, name: str, champion: str, champion_version: str
) -> tuple[Store | None, str]:
    """Where to upload to, None for nowhere, and the version that CHAMPION has to name for a move.

    Raises:
        KfpDdpError: it cannot be written.
    """
    bundles.check_model_name(name)
    if not destination:
        return None, ""
    where = open_store(destination)
    where.prepare()
    return where, compared_with(champion, champion_version, where, name)


def _blessed(verdict: Path, folder: Path) -> Path:
    """The verdict, if it is one on this bundle that lets the model out.

    Raises:
        InputError: it is missing, is of another evaluation than the bundle, or says no.
    """
    try:
        said = json.loads(verdict.read_text(encoding="utf-8"))
        blessed, reason = bool(said["blessed"]), str(said["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"there is no verdict {verdict}: run gate before publish, on this evaluation"
        ) from None
    if not blessed:
        raise InputError(f"the gate did not bless this model, so it is not published: {reason}")
    metrics = folder / bundles.METRICS
    judged = said.get("evaluation_sha256", "")
    if judged and metrics.is_file() and judged != sha256(metrics):
        raise InputError(
            f"{verdict} is of another evaluation than {folder}: run gate again, on the evaluation "
            "that was exported"
        )
    return verdict


def add_decision(folder: Path, lineage: Lineage, verdict: Path | None, report: Path | None) -> Path:
    """Make the bundle anew with these files in it, unless it has them already.

    Args:
        folder: A whole bundle, `<run_dir>/bundle`; the new one takes its place.
        lineage: Who publishes it, and whom it was compared with.
        verdict: What the gate left; None for no verdict.
        report: The report, where there is one.

    Returns:
        The folder.

    Raises:
        InputError: the bundle is not whole, or its folder cannot be written.
    """
    whole = bundles.intact(folder)
    if not whole and not bundles.intact(folder, but=_OURS):  # a bucket may have got some of these
        raise InputError(f"{folder} is no whole bundle: run export again")
    more = {VERDICT: verdict, REPORT: report if report is not None and report.is_file() else None}
    there = {name: path for name, path in more.items() if path is not None}
    if (
        whole
        and lineage.is_in(folder)
        and all(_same(path, folder / name) for name, path in there.items())
    ):
        return folder
    dataset_digest = Evaluation.read(folder / bundles.METRICS).dataset_digest
    skipped = {bundles.MANIFEST, bundles.SUCCESS, *_OURS}
    with bundles.replacing(folder.parent) as made:
        for name in bundles.files(folder):
            if name not in skipped:
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(folder / name, made / name)
        for name, path in there.items():
            shutil.copyfile(path, made / name)
        bundles.write_json(made / LINEAGE, lineage.record(dataset_digest))
    return folder


def _same(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()


def publish(
    folder: Path,
    name: str,
    where: Store,
    expected: str,
    run_id: str = "",
    registry: Registry | None = None,
) -> tuple[str, str]:
    """Upload a bundle and make it the champion, if that still is what it was compared with.

    Args:
        folder: The bundle.
        name: Of the model.
        where: The destination.
        expected: The version that it was compared with; '' for none.
        run_id: Of the run that publishes it.
        registry: Has the version before it becomes the champion; None for none.

    Returns:
        The bundle's URI, and why it is not the champion, '' if it is.

    Raises:
        KfpDdpError: it cannot be written, or arrives different.
    """
    uri, version = bundles.upload(folder, name, where), bundles.version(folder)
    if registry is not None:
        registry.register(where, name, version)
    found = move(where, name, version, expected, run_id)
    if found == version:
        return uri, ""
    return uri, (
        f"{version} was uploaded, but {expected or 'none'}, which it was compared with, is not the "
        f"champion any more: CHAMPION names {found or 'none'} and stays; run the gate again"
    )


def _prune(models: Store, keep: int, service: str) -> None:
    """Delete the bundles of old attempts, but for those that a service still needs."""
    try:
        spared = in_service(Api.connect()) if service else ()
    except KfpDdpError as error:
        print(f"no bundle was deleted: {error}")
        return
    if gone := attempts.prune(models, keep, spared):
        print(f"deleted {len(gone)} old bundle(s): {', '.join(gone)}")


def _described(folder: Path, name: str, place: str, lineage: Lineage, stays: str) -> dict[str, Any]:
    """The bundle in the words of an artifact's metadata, from its files alone."""
    result = Evaluation.read(folder / bundles.METRICS)
    return {
        "name": name,
        "uri": place,
        "digest": bundles.digest(folder),
        "version": bundles.version(folder),
        "checkpoint_digest": result.checkpoint_digest,
        "dataset_digest": result.dataset_digest,
        "run_id": lineage.run_id,
        "champion_version": lineage.champion_version,
        "framework": "PyTorch",
        "architecture": result.model,
        "formats": ", ".join(sorted(path.name for path in folder.glob("model.*"))),
        "classes": len(result.classes),
        "image_size": result.image_size,
        "accuracy": round(result.accuracy, 6),
        "samples": result.samples,
        "champion_stays": stays,
    }


def _tell(run_dir: Path, said: dict[str, Any], model: "dsl.Model", summary: "dsl.Markdown") -> None:
    """Fill the artifacts, and leave the same for who tells of the run."""
    text = json.dumps(said, indent=1) + "\n"
    model.metadata.update(said)
    # The artifact's own object points to the bundle: its URI is KFP's to give.
    Path(model.path).parent.mkdir(parents=True, exist_ok=True)
    Path(model.path).write_text(text, encoding="utf-8")
    with atomic_write(run_dir / EXPORTED) as file:
        file.write(text.encode())
    told = {name: str(said[name]) for name in ("uri", "digest", "champion")}
    trackers.note(run_dir, {}, {f"kfp_ddp.bundle.{k}": v for k, v in told.items()})
    lines = [f"## {said['name']} {said['version']}", "", cell(said["uri"]), ""]
    lines += [cell(said["champion_stays"]), ""] if said["champion_stays"] else []
    lines += ["| | |", "|---|---|"]
    lines += [f"| {key} | {cell(str(value))} |" for key, value in said.items() if value != ""]
    Path(summary.path).write_text("\n".join(lines) + "\n", encoding="utf-8")
