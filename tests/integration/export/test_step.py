import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kfp_ddp.components.export.component import export
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.export import formats
from kfp_ddp.export.engine import make
from kfp_ddp.export.formats import from_bundle, from_checkpoint
from kfp_ddp.models import bundle
from tests.evaluations import Trained
from tests.exports import arguments
from tests.sync_runs import small_disk
from tests.tolerance import near

FILES = [
    *("MANIFEST.sha256", "README.md", "_SUCCESS", "classes.json", "config.json", "infra.json"),
    *("latency.json", "metrics.json", "model.onnx", "model.pt2", "model.safetensors"),
    *("parity.json", "predictions.csv", "provenance.json", "reference.csv"),
    *("sample/request.json", "sample/response.json"),
    *("serving/squares/1/model.onnx", "serving/squares/config.pbtxt"),
    *("serving/squares/labels.txt", "signature.json"),
]

COMPUTED = {"model.onnx", "model.pt2", "model.safetensors"}


@pytest.fixture(scope="session")
def exported(
    trained_checkpoint: Path, trained_dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    """A training with an evaluation and a bundle; tests that change it take a copy."""
    exported = Trained(trained_checkpoint, tmp_path_factory.mktemp("made"), trained_dataset)
    exported.evaluate(worst=4)
    exported.export()
    return exported


@pytest.fixture
def model(exported: Trained, tmp_path: Path) -> Trained:
    return exported._replace(run_dir=Path(shutil.copytree(exported.run_dir, tmp_path / "run")))


@pytest.mark.slow
def test_blur_pooling_is_exported(trained: Trained, blurred_checkpoint: Path) -> None:
    blurred = trained._replace(checkpoint=blurred_checkpoint)
    blurred.evaluate()
    folder = blurred.export()
    assert bundle.intact(folder)
    assert set(json.loads((folder / "parity.json").read_text())["formats"]) == COMPUTED


def test_a_bundle_has_all_files_and_their_digests(exported: Trained) -> None:
    folder = exported.bundle
    assert bundle.files(folder) == FILES
    assert bundle.intact(folder)
    manifest = (folder / "MANIFEST.sha256").read_bytes()
    assert (folder / "_SUCCESS").read_text() == hashlib.sha256(manifest).hexdigest() + "\n"
    assert {(folder / name).stat().st_mode & 0o777 for name in FILES} == {0o644}
    assert [p.name for p in exported.run_dir.iterdir() if p.name.startswith(".")] == []
    if shutil.which("sha256sum"):
        check = ["sha256sum", "--check", "--strict", "--quiet", "MANIFEST.sha256"]
        subprocess.run(check, cwd=folder, check=True)


def test_the_onnx_file_is_for_old_runtimes_and_has_no_local_paths(exported: Trained) -> None:
    onnx = pytest.importorskip("onnx")
    path = exported.bundle / "model.onnx"
    model = onnx.load(path)
    assert model.ir_version == 8
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 18)]
    for value in (model.graph.input[0], model.graph.output[0]):
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"
    assert model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.UINT8
    content = path.read_bytes()
    assert b"stack_trace" not in content
    assert os.getcwd().encode() not in content
    assert b".py" not in content
    assert os.path.samefile(path, exported.bundle / "serving" / "squares" / "1" / "model.onnx")


@pytest.mark.parametrize("batch", [1, 3, 37])
def test_formats_agree_for_any_batch(exported: Trained, batch: int) -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (batch, 3, 16, 16), dtype=torch.uint8)
    expected = from_checkpoint(exported.checkpoint)(images)
    loaded = from_bundle(exported.bundle)
    assert set(loaded) == COMPUTED
    for predict in loaded.values():
        torch.testing.assert_close(predict(images), expected, atol=1e-4, rtol=1e-4)


def test_the_documents_describe_the_model(exported: Trained) -> None:
    def read(name: str) -> Any:
        return json.loads((exported.bundle / name).read_text())

    assert read("classes.json") == ["blue", "green", "red"]
    assert read("signature.json")["inputs"][0]["shape"] == ["batch", 3, 16, 16]
    assert read("signature.json")["dynamic"] == {"batch": {"min": 1, "max": 1024}}
    assert read("config.json")["training"]["model"] == "cifar_resnet8"
    assert read("metrics.json")["samples"] == 48
    parity = read("parity.json")
    assert parity["batches"] == [1, 16]
    assert all(f["same_top1"] == 1 for f in parity["formats"].values())
    assert parity["formats"]["model.safetensors"]["max_abs_difference"] == near(0)
    assert read("latency.json")["runtimes"]["model.onnx"]["batch_8"]["calls"] >= 3
    configured = (exported.bundle / "serving" / "squares" / "config.pbtxt").read_text()
    assert 'name: "squares"' in configured
    assert "dims: [ 3, 16, 16 ]" in configured


def run_example(exported: Trained) -> None:
    """Run the example in the model card of a bundle on one image."""
    folder = exported.bundle
    example = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[0]
    with (folder / "predictions.csv").open(newline="") as file:
        path, _, predicted = list(csv.reader(file))[1][:3]
    code = example.replace("picture.jpg", str(exported.dataset / "val" / path))
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == predicted


def test_the_example_in_the_model_card_runs(exported: Trained) -> None:
    run_example(exported)


def test_the_step_fills_artifacts_and_reuses_a_bundle(model: Trained, tmp_path: Path) -> None:
    inputs = arguments(model, tmp_path)
    assert export.python_func(**inputs) == str(model.bundle)
    metadata = inputs["exported_model"].metadata
    assert metadata["uri"] == str(model.bundle)
    assert metadata["digest"] == bundle.local_bundle(model.bundle).digest
    assert metadata["formats"] == "model.onnx, model.pt2, model.safetensors"
    assert json.loads((tmp_path / "model").read_text()) == metadata
    assert "largest difference" in (tmp_path / "summary").read_text()
    made_at = model.bundle.stat().st_ctime_ns
    assert export.python_func(**inputs) == str(model.bundle)
    assert model.bundle.stat().st_ctime_ns == made_at
    (model.bundle / "model.onnx").write_bytes(b"torn")
    assert not bundle.intact(model.bundle)
    export.python_func(**inputs)
    assert bundle.intact(model.bundle)
    assert bundle.files(model.bundle) == FILES


def test_perturbed_graph(model: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(model.bundle)
    onnx, real = pytest.importorskip("onnx"), formats.write_onnx

    def wrong(program: Any, info: Any, path: Path) -> None:
        real(program, info, path)
        graph = onnx.load(path)
        bias = next(i for i in graph.graph.initializer if i.name.endswith("fc.bias"))
        values = onnx.numpy_helper.to_array(bias) + 0.01
        bias.CopyFrom(onnx.numpy_helper.from_array(values.astype("float32"), bias.name))
        onnx.save(graph, path)

    monkeypatch.setattr(formats, "write_onnx", wrong)
    inputs = arguments(model, tmp_path)
    with pytest.raises(SystemExit, match=r"error: model\.onnx differs from the checkpoint"):
        export.python_func(**inputs)
    assert {p.name for p in model.run_dir.iterdir()} <= {"evaluation", ".leases"}


@pytest.mark.parametrize(
    "fitting",
    [[], ["model.safetensors"], ["model.safetensors", "model.pt2"]],
    ids=["weights", "program", "onnx"],
)
def test_a_full_disk_at_any_file(exported: Trained, tmp_path: Path, fitting: list[str]) -> None:
    size = 20_000 + sum((exported.bundle / name).stat().st_size for name in fitting)
    with (
        small_disk(tmp_path / "disk", f"size={size}") as disk,
        pytest.raises(StorageError, match=r"^cannot write to .*No space left on device"),
    ):
        make(exported.checkpoint, disk, exported.dataset / "val", exported.evaluation, "squares")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"model_name": "../up"}, "model_name is '../up'"),
        ({"model_name": ""}, "model_name is ''"),
        ({"checkpoint": "/nowhere/step-1"}, "there is no checkpoint /nowhere/step-1"),
        ({"evaluation": "/nowhere/evaluation.json"}, "run evaluate first"),
    ],
)
def test_invalid_input(changed: dict[str, str], text: str, model: Trained, tmp_path: Path) -> None:
    shutil.rmtree(model.bundle)
    with pytest.raises(SystemExit, match=re.escape(text)):
        export.python_func(**arguments(model, tmp_path) | changed)
    assert not model.bundle.exists()


def test_a_damaged_or_other_checkpoint_is_refused(model: Trained, tmp_path: Path) -> None:
    shutil.rmtree(model.bundle)
    checkpoint = Path(shutil.copytree(model.checkpoint, tmp_path / "step-00000040"))
    model = model._replace(checkpoint=checkpoint)
    state = bytearray((checkpoint / "state.pt").read_bytes())
    state[len(state) // 2] ^= 1
    (checkpoint / "state.pt").write_bytes(state)
    with pytest.raises(InputError, match="was altered"):
        model.export()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["state.pt"]["sha256"] = "0" * 64
    del manifest["sha256"]
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="is of another checkpoint"):
        model.export()
