"""Provenance of a bundle: its bill of materials, and the images of its run."""

import re
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp import __version__
from kfp_ddp.export import provenance
from kfp_ddp.k8s.pods import record_images, used_images
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.storage.store import sha256
from tests import cluster
from tests.exports import evaluated


@pytest.fixture
def result(tmp_path: Path) -> Evaluation:
    return Evaluation.read(evaluated(tmp_path / "evaluation", "evaluation.json", 3))


def test_it_lists_model_data_code_files_and_packages(
    result: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KFP_DDP_REVISION", "f" * 40 + "\n")
    (tmp_path / "model.onnx").write_bytes(b"graph")
    (tmp_path / "classes.json").write_bytes(b"[]")
    bill = provenance.record(tmp_path, "squares", result)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    model = bill["metadata"]["component"]
    assert (model["type"], model["name"]) == ("machine-learning-model", "squares")
    assert model["hashes"] == [{"alg": "SHA-256", "content": "c" * 64}]
    properties = {one["name"]: one["value"] for one in bill["metadata"]["properties"]}
    assert properties["kfp-ddp:revision"] == "f" * 40
    assert properties["kfp-ddp:dataset_digest"] == "d" * 64
    assert re.fullmatch("[0-9a-f]{64}", properties["kfp-ddp:source_sha256"])
    by_type: dict[str, list[dict[str, Any]]] = {}
    for one in bill["components"]:
        by_type.setdefault(one["type"], []).append(one)
    assert by_type["data"] == [{"type": "data", "name": "dataset", "version": "d" * 64}]
    (file,) = by_type["file"]
    assert file["name"] == "model.onnx"
    assert file["hashes"] == [{"alg": "SHA-256", "content": sha256(tmp_path / "model.onnx")}]
    names = [one["name"] for one in by_type["library"]]
    assert {"torch", "onnxruntime", "pydantic"} <= set(names)
    assert names == sorted(set(names))
    assert all(re.fullmatch(r"pkg:pypi/[a-z0-9-]+@\S+", one["purl"]) for one in by_type["library"])
    references = [one["bom-ref"] for one in bill["components"] if "bom-ref" in one]
    assert len(references) == len(set(references)), "CycloneDX requires unique ones"


def test_the_image_of_the_step_is_named_by_its_digest(
    result: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is from the API server of a cluster."""
    image = "ghcr.io/kfp-ddp/trainer:0.1.0"  # as in a pipeline
    digest = "sha256:" + "a" * 64
    monkeypatch.setattr(
        provenance, "record_images", lambda: {"step": [{"image": image, "digest": digest}]}
    )
    bill = provenance.record(tmp_path, "squares", result)
    assert {"type": "container", "name": image, "version": digest} in bill["components"]


TRAINER = "registry.example/team/trainer:1.0"
OLD, NEW = "sha256:" + "0" * 64, "sha256:" + "1" * 64


def pod(name: str, image_id: str) -> dict[str, Any]:
    """A pod with a container of ours and a sidecar."""
    containers = [{"name": one, "image": TRAINER} for one in ("pytorch", "istio-proxy")]
    ids = (image_id, "istio@" + "sha256:" + "2" * 64)
    statuses = [{**one, "imageID": own} for one, own in zip(containers, ids, strict=True)]
    spec = {"containers": containers}
    return cluster.pod(name, spec=spec, containerStatuses=statuses)


WAITING = {**pod("w-0", OLD), "status": {"phase": "Pending"}}


@pytest.mark.parametrize(
    ("pods", "digests"),
    [
        ([pod("w-0", NEW)], [NEW]),
        ([pod("w-0", f"registry.example/team/trainer@{NEW}")], [NEW]),
        ([pod("w-0", f"docker-pullable://trainer@{NEW}")], [NEW]),
        ([pod("w-0", OLD), pod("w-1", NEW), pod("w-2", OLD)], [OLD, NEW]),  # a moved tag
        ([WAITING, pod("w-1", ""), {**WAITING, "status": {}}], []),  # they never started
    ],
)
def test_images_are_recorded_by_name_and_digest(
    pods: list[dict[str, Any]], digests: list[str]
) -> None:
    expected = [{"image": TRAINER, "digest": digest} for digest in digests]
    assert used_images(pods, ("pytorch",)) == expected


def test_record_outside_of_a_pod_has_the_version() -> None:
    record = record_images([pod("w-0", NEW)], ("pytorch",))
    assert record["version"] == __version__
    assert record["step"] == []
    assert record["workers"] == [{"image": TRAINER, "digest": NEW}]
