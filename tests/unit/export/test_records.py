"""Records of a bundle: its bill of materials, the images of its run, and the infrastructure."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from kfp_ddp import __version__
from kfp_ddp.core.files import sha256
from kfp_ddp.export import infra, infra_process, provenance, variants
from kfp_ddp.k8s.pods import record_images, used_images
from kfp_ddp.models.variants import FILES
from tests import cluster
from tests.evaluations import record

IMAGES = np.arange(3 * 3 * 4 * 4, dtype=np.uint8).reshape(3, 3, 4, 4)
SUMS = IMAGES.astype(np.float32).sum((2, 3))
IMPORTABLE = """
import importlib
def importable(name):
    try:
        return bool(importlib.import_module(name))
    except ModuleNotFoundError:
        return False
"""


def test_each_form_of_a_model_has_a_writer() -> None:
    assert variants._WRITERS.keys() == FILES.keys()


def test_components(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_DDP_REVISION", "f" * 40 + "\n")
    step = [{"image": TRAINER, "digest": NEW}]  # from the API server of a cluster
    monkeypatch.setattr(provenance, "record_images", lambda: {"step": step})
    (tmp_path / "model.onnx").write_bytes(b"graph")
    (tmp_path / "classes.json").write_bytes(b"[]")
    bill = provenance.record(tmp_path, "squares", record(97))
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
    assert by_type["container"] == [{"type": "container", "name": TRAINER, "version": NEW}]
    (file,) = by_type["file"]
    assert file["name"] == "model.onnx"
    assert file["hashes"] == [{"alg": "SHA-256", "content": sha256(tmp_path / "model.onnx")}]
    names = [one["name"] for one in by_type["library"]]
    assert {"torch", "onnxruntime", "pydantic"} <= set(names)
    assert names == sorted(set(names))
    assert all(re.fullmatch(r"pkg:pypi/[a-z0-9-]+@\S+", one["purl"]) for one in by_type["library"])
    references = [one["bom-ref"] for one in bill["components"] if "bom-ref" in one]
    assert len(references) == len(set(references)), "CycloneDX requires unique ones"


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
        ([pod("w-0", f"docker-pullable://trainer@{NEW}")], [NEW]),
        ([pod("w-0", OLD), pod("w-1", NEW), pod("w-2", OLD)], [OLD, NEW]),  # a moved tag
        ([WAITING, pod("w-1", ""), {**WAITING, "status": {}}], []),  # they never started
    ],
)
def test_images_by_name_and_digest(pods: list[dict[str, Any]], digests: list[str]) -> None:
    expected = [{"image": TRAINER, "digest": digest} for digest in digests]
    assert used_images(pods, ("pytorch",)) == expected


def test_record_outside_of_a_pod_has_the_version() -> None:
    record = record_images([pod("w-0", NEW)], ("pytorch",))
    assert record["version"] == __version__
    assert record["step"] == []
    assert record["workers"] == [{"image": TRAINER, "digest": NEW}]


def write(path: Path, *nodes: Any, classes: int = 3) -> None:
    """A model of uint8 images [batch, 3, 4, 4], by default the sum of each channel."""
    nodes = nodes or (
        helper.make_node("Cast", ["images"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["floats", "axes"], ["logits"], keepdims=0),
    )
    graph = helper.make_graph(
        list(nodes), "sums",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["batch", 3, 4, 4])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", classes])],
        [helper.make_tensor("axes", TensorProto.INT64, [2], [2, 3])],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    path.write_bytes(proto.SerializeToString())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infra, "SECONDS_EACH", 0.0)


def test_correct_models_pass_with_time_and_memory(tmp_path: Path) -> None:
    write(tmp_path / "model.onnx")
    write(tmp_path / "model.int8.onnx")
    result = infra.validate(tmp_path, IMAGES, SUMS, 1e-4)
    assert (result["passed"], result["reason"], result["samples"]) == (True, "", 3)
    assert list(result["files"]) == ["model.onnx", "model.int8.onnx"]
    took = result["files"]["model.onnx"]
    assert took["max_abs_difference"] == 0
    assert took["same_top1"] == 1
    assert took["runtime"].startswith("onnxruntime ")
    assert 10 < took["memory_mb"] < 4000
    assert set(took["latency"]) == {"batch_1", "batch_8"}
    one = took["latency"]["batch_1"]
    assert 0 < one["median_ms"] <= one["p95_ms"]
    assert one["calls"] >= 5
    json.dumps(result, allow_nan=False)


def test_only_the_runtime_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same program, which imports some packages instead of running the model."""
    tried = ["torch", "onnx", "kfp_ddp", "PIL", "pip", "onnxruntime", "numpy", "json"]
    source, line = Path(infra_process.__file__).read_text(), "    import numpy\n"
    assert line in source
    tries = "    return json.dump({x: importable(x) for x in request['tried']}, sys.stdout)\n"
    program = tmp_path / "program.py"
    program.write_text(IMPORTABLE + source.replace(line, tries + line, 1))
    monkeypatch.setattr(infra_process, "__file__", str(program))
    answer, error = infra._run({"tried": tried})
    assert not error
    assert [name for name in tried if answer[name]] == ["onnxruntime", "numpy", "json"]


def refused(folder: Path, expected: Any = SUMS) -> str:
    result = infra.validate(folder, IMAGES, expected, 1e-4)
    assert result["passed"] is False
    json.dumps(result, allow_nan=False)
    reason: str = result["reason"]
    assert "\n" not in reason
    return reason


def test_a_wrong_model_does_not_pass(tmp_path: Path) -> None:
    write(tmp_path / "model.onnx")
    off = SUMS + np.float32(1)
    assert refused(tmp_path, off) == (
        "model.onnx: differs from the checkpoint by 1, 0.0001 is allowed"
    )
    assert refused(tmp_path, SUMS[:, :2]).endswith("logits of shape [4, 3], not [4, 2]")
    assert "by 1e+38" in refused(tmp_path, SUMS * np.float32("nan"))


def test_a_model_that_cannot_be_loaded_does_not_pass(tmp_path: Path) -> None:
    assert refused(tmp_path) == "there is no ONNX file to load"
    (tmp_path / "model.onnx").write_bytes(b"torn")
    assert refused(tmp_path).startswith(
        "model.onnx: fails where only its runtime is installed: onnxruntime.capi"
    )
    write(tmp_path / "model.onnx")
    (tmp_path / "model.int8.onnx").write_bytes(b"torn")
    assert refused(tmp_path).startswith("model.int8.onnx: fails")


def test_a_hanging_or_killed_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "model.onnx")
    program = tmp_path / "program.py"
    monkeypatch.setattr(infra_process, "__file__", str(program))
    program.write_text("import os; os.kill(os.getpid(), 9)")
    assert refused(tmp_path) == "model.onnx: was ended by signal 9 (9 usually means out of memory)"
    monkeypatch.setattr(infra, "SECONDS", 0.2)
    program.write_text("import time; time.sleep(600)")
    assert refused(tmp_path) == "model.onnx: has not answered within 0 s"
