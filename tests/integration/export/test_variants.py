"""Further forms of a trained model, and their evaluation on the complete split."""

import csv
import dataclasses
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image

from kfp_ddp.components.export.component import export
from kfp_ddp.core import folders
from kfp_ddp.core.errors import InputError
from kfp_ddp.export import card, formats, prove, variants
from kfp_ddp.export.formats import Predict
from kfp_ddp.models import bundle
from kfp_ddp.models.bundle import local_bundle
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.models.release import Variants
from kfp_ddp.models.variants import MeasuredVariant, read
from kfp_ddp.training.state.checkpoint import load_model
from tests.evaluations import Trained
from tests.exports import arguments

REQUESTED = Variants(variants=("fp16", "int8"), max_variant_drop=0.3)
MEASURED_TIMES = {"latency.json", "infra.json"}


@pytest.fixture(scope="module")
def exported(
    trained_checkpoint: Path, trained_dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    """A training with a bundle that has all further forms."""
    exported = Trained(trained_checkpoint, tmp_path_factory.mktemp("forms"), trained_dataset)
    tags, val = exported.run_dir / "tags.csv", trained_dataset / "val"
    names = [path.relative_to(val).as_posix() for path in val.rglob("*.png")]
    tags.write_text("path,digit\n" + "".join(f"{name},{name[-5]}\n" for name in names))
    exported.evaluate(worst=4, options={"tags": str(tags)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prove, "_SECONDS_EACH", 0.0)
        exported.export(REQUESTED)
    return exported


def forms(exported: Trained) -> dict[str, MeasuredVariant]:
    return {one.name: one for one in read(local_bundle(exported.bundle)).variants}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp16", "int8"])
def test_a_record_agrees_with_its_file(name: str, exported: Trained) -> None:
    form, folder = forms(exported)[name], exported.bundle
    runtime = onnxruntime.InferenceSession(folder / form.file, providers=["CPUExecutionProvider"])
    classes = json.loads((folder / "classes.json").read_text())
    with (folder / "predictions.csv").open() as file:
        before = {row["path"]: row for row in csv.DictReader(file)}
    now = dict[str, str]()
    for path in (exported.dataset / "val").rglob("*.png"):  # decoded by another library
        pixels = np.asarray(Image.open(path).convert("RGB")).transpose(2, 0, 1)
        (logits,) = runtime.run(["logits"], {"images": np.ascontiguousarray(pixels)[None]})
        now[path.relative_to(exported.dataset / "val").as_posix()] = classes[logits.argmax()]
    assert now.keys() == before.keys()
    correct = {path for path, row in before.items() if row["target"] == row["predicted"]}
    correct_now = {path for path, row in before.items() if row["target"] == now[path]}
    assert form.evaluation.samples == len(now) == 48
    assert form.evaluation.correct == len(correct_now)
    assert (form.won, form.lost) == (len(correct_now - correct), len(correct - correct_now))
    assert form.gain == pytest.approx((len(correct_now) - len(correct)) / 48)
    assert form.low <= form.gain <= form.high
    digits, right = (Counter(path[-5] for path in paths) for paths in (now, correct_now))
    slices = [(one.value, one.samples, one.correct) for one in form.evaluation.slices]
    assert slices == [(digit, digits[digit], right[digit]) for digit in sorted(digits)]
    same = sum(now[path] == row["predicted"] for path, row in before.items())
    assert form.agreement == pytest.approx(same / 48)
    assert form.agreement > 0.85
    assert form.size == (folder / form.file).stat().st_size
    model = Evaluation.read(folder / "metrics.json")
    assert form.evaluation.same_samples(model)
    assert form.evaluation.checkpoint_digest == model.checkpoint_digest


def test_the_forms_have_their_number_types_and_are_for_old_runtimes(exported: Trained) -> None:
    folder = exported.bundle
    models = {name: onnx.load(folder / one.file) for name, one in forms(exported).items()}
    for model in models.values():
        assert (model.ir_version, [o.domain for o in model.opset_import]) == (8, [""])
        assert model.opset_import[0].version == 18
        assert model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.UINT8
        assert model.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT
        assert [p.key for p in model.metadata_props] == ["classes", "model", "image_size"]
    types = {
        name: {one.data_type for one in model.graph.initializer if one.dims and one.dims[0] > 4}
        for name, model in models.items()
    }
    assert types["fp16"] == {onnx.TensorProto.FLOAT16}
    assert onnx.TensorProto.INT8 in types["int8"]
    # Normalisation comes before quantisation.
    order = [node.op_type for node in models["int8"].graph.node]
    assert order.index("QuantizeLinear") > max(order.index("Mul"), order.index("Add"))
    scales = [len(one.dims) for one in models["int8"].graph.initializer if "_scale" in one.name]
    assert max(scales) == 1, "a scale per channel"
    sizes = {name: (folder / name).stat().st_size for name in ("model.onnx", "model.int8.onnx")}
    assert sizes["model.int8.onnx"] < 0.5 * sizes["model.onnx"]
    assert forms(exported)["int8"].made["calibration_images"] == 123


def test_the_forms_are_in_the_bundle_and_its_documents(exported: Trained) -> None:
    record = read(local_bundle(exported.bundle))
    assert record.left_out == {}
    assert [form.name for form in record.variants] == ["fp16", "int8"]
    files = bundle.files(exported.bundle)
    assert {"model.fp16.onnx", "model.int8.onnx"} <= set(files)
    timed = json.loads((exported.bundle / "latency.json").read_text())["runtimes"]
    assert {"model.onnx", "model.int8.onnx"} <= set(timed)
    assert "| `model.int8.onnx` |" in (exported.bundle / "README.md").read_text()


def test_the_step_reuses_the_forms_of_the_release(exported: Trained, tmp_path: Path) -> None:
    inputs = arguments(exported, tmp_path)
    before = exported.bundle.stat().st_ctime_ns
    export.python_func(**inputs, release=REQUESTED.explicit())
    assert exported.bundle.stat().st_ctime_ns == before
    assert "model.int8.onnx" in inputs["exported_model"].metadata["formats"].split(", ")
    assert "## Further forms" in (tmp_path / "summary").read_text()
    with pytest.raises(SystemExit, match=r"error: variants\.0='resize' cannot be used"):
        export.python_func(**inputs, release={"variants": ["resize"]})


@pytest.mark.slow
def test_exports_repeat(exported: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "_SECONDS_EACH", 0.0)
    shutil.copytree(exported.evaluation.parent, tmp_path / "evaluation")
    again, first = exported._replace(run_dir=tmp_path).export(REQUESTED), exported.bundle
    assert bundle.files(again) == bundle.files(first)
    others = set(bundle.files(first)) - MEASURED_TIMES - {bundle.MANIFEST, bundle.SUCCESS}
    differ = {name for name in others if (again / name).read_bytes() != (first / name).read_bytes()}
    assert not differ


@pytest.fixture
def source(exported: Trained, tmp_path: Path) -> Any:
    """Inputs of `variants.add` in a new folder."""
    folder = Path(shutil.copytree(exported.bundle, tmp_path / "bundle"))
    for form in forms(exported).values():
        (folder / form.file).unlink()
    info, result = load_model(exported.checkpoint)[1], Evaluation.read(exported.evaluation)
    return variants.VariantSource(
        folder, info, exported.dataset / "val", exported.evaluation, result
    )


def _only_red(images: torch.Tensor) -> torch.Tensor:
    return torch.tensor([[0.0, 0.0, 1.0]]).repeat(len(images), 1)


def _broken(images: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel for this\nand advice")


@pytest.mark.parametrize(
    ("predict", "why"),
    [
        (_only_red, r"it loses 0\.\d{4} of the accuracy, 0\.05 is allowed \(max_variant_drop\)"),
        (lambda images: _only_red(images) * torch.nan, r"it gives NaN or infinity for \d+\.png"),
        (_broken, "RuntimeError: no kernel for this"),
    ],
)
def test_a_weak_or_broken_form_leaves_no_file(
    predict: Predict, why: str, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(source: Any, requested: Variants, target: Path) -> dict[str, str | int]:
        shutil.copy(source.folder / "model.onnx", target)
        return {}

    load = formats.onnx_predict
    monkeypatch.setattr(variants, "_WRITERS", {"fp16": write, "int8": write})
    monkeypatch.setattr(formats, "onnx_predict", lambda p: predict if "fp16" in p.name else load(p))
    requested = Variants(variants=("fp16", "int8"), max_variant_drop=0.05)
    result, functions = variants.add(source, requested)
    assert list(result.left_out) == ["fp16"]
    assert re.fullmatch(why, result.left_out["fp16"])
    assert [one.name for one in result.variants] == ["int8"]
    assert list(functions) == ["model.int8.onnx"]
    assert not (source.folder / "model.fp16.onnx").exists()
    parity, latency = {"samples": 1, "formats": {}}, {"runtimes": {}, "machine": "", "threads": 1}
    summary = card.markdown("squares", "", {}, parity, latency, result)
    assert "`fp16` is left out: " in summary


def test_a_changed_split_is_refused(source: Any, trained_dataset: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(trained_dataset, tmp_path / "data"))
    next((changed / "val" / "red").iterdir()).unlink()
    source = dataclasses.replace(source, split=changed / "val")
    with pytest.raises(InputError, match="has other samples now than when it was evaluated"):
        variants.add(source, Variants(variants=("fp16",)))


def test_int8_needs_training_images(source: Any, trained_dataset: Path, tmp_path: Path) -> None:
    alone = tmp_path / "data"
    shutil.copytree(trained_dataset / "val", alone / "val")
    source = dataclasses.replace(source, split=alone / "val")
    result, _ = variants.add(source, Variants(variants=("int8",)))
    assert "train" in result.left_out["int8"]
    assert not (source.folder / "model.int8.onnx").exists()


@pytest.mark.slow
def test_a_repeated_export_to_a_bucket_removes_other_forms(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(folders.SCRATCH_VARIABLE, str(tmp_path / "scratch"))
    monkeypatch.setattr(prove, "_SECONDS_EACH", 0.0)
    checkpoint = trained.run_dir / "checkpoints" / trained.checkpoint.name
    shutil.copytree(trained.checkpoint, checkpoint)
    trained = trained._replace(checkpoint=checkpoint)
    trained.evaluate()
    inputs = arguments(trained, tmp_path)
    inputs |= {name: f"file://{inputs[name]}" for name in ("run_dir", "checkpoint", "evaluation")}
    release = {"variants": ["fp16"], "max_variant_drop": 1.0}
    export.python_func(**inputs, release=release)
    assert (trained.bundle / "model.fp16.onnx").exists()
    success = trained.bundle / "_SUCCESS"
    times = success.stat().st_mtime_ns
    export.python_func(**inputs, release=release)
    assert success.stat().st_mtime_ns == times, "it was reused"
    export.python_func(**inputs)
    assert bundle.intact(trained.bundle)
    assert not (trained.bundle / "model.fp16.onnx").exists()
