"""Initial weights: which files are read, and which are refused in one line."""

import hashlib
import pickle
import zipfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kfp_ddp.core.errors import InputError
from kfp_ddp.models import weights
from kfp_ddp.training.model.networks import build, build_for
from kfp_ddp.training.prepare import check_network
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.torchvision_weights import TORCHVISION, cached
from kfp_ddp.training.state import checkpoint
from kfp_ddp.training.state.checkpoint import ModelInfo
from kfp_ddp.training.state.initial_weights import initialise, network_of

CLASSES = ("a", "b")
State = dict[str, Tensor]


def run(pretrained: str | Path, **fields: Any) -> TrainConfig:
    more = {"model": "cifar_resnet8", "image_size": 32, **fields}
    return TrainConfig.create(data="/d", output_dir="/o", pretrained=str(pretrained), **more)


def started(config: TrainConfig, classes: tuple[str, ...] = CLASSES) -> nn.Module:
    torch.manual_seed(1)
    network = build_for(config, len(classes))
    initialise(network, config, classes, report=True)
    return network


def source(classes: int = 2, name: str = "cifar_resnet8") -> State:
    torch.manual_seed(0)
    return build(name, classes, image_size=32).state_dict()


def check_weights(network: nn.Module, state: State, ignored: str = "-") -> None:
    own = network.state_dict()
    assert all(torch.equal(own[n], v) for n, v in state.items() if not n.startswith(ignored))


def named(prefix: str, state: State) -> State:
    return {prefix + name: value for name, value in state.items()}


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda state: state,
        lambda state: named("module.", state),
        lambda state: {"state_dict": named("model.", state) | {"loss.weight": torch.ones(2)}},
        lambda state: {"model": state, "optimizer": {"state": {}}, "epoch": 3},
        lambda state: {
            "model": named("module.", dict.fromkeys(state, torch.zeros(1))),
            "model_ema": named("module.", state) | {"n_averaged": torch.tensor(7)},
        },
        lambda state: {n: v for n, v in state.items() if "num_batches" not in n},
        lambda state: named("timm_model.", state),
        lambda state: {
            "state_dict": named("module.encoder_q.", state) | {"module.queue": torch.ones(9)},
            "args": Namespace(lr=1, at=Path("/runs"), windows=PureWindowsPath("c:/runs")),
            "best": np.float64(76.1),
            "rng": np.random.RandomState(0).get_state(),
            "history": defaultdict(list, loss=[1.0]),
        },
        lambda state: named("module._orig_mod.module.", state),
        lambda state: {n.replace("features.", "features.module."): v for n, v in state.items()},
        lambda state: {"nets": [{"student": state, "teacher": source(2, "resnet18")}]},
        lambda state: {"callbacks": {"ema_weights": named("m.", state)}, "net": named("m.", state)},
    ],
)
def test_file_of_another_project_is_read(tmp_path: Path, wrapped: Callable[[State], Any]) -> None:
    torch.save(wrapped(source()), tmp_path / "theirs.pth")
    check_weights(started(run(tmp_path / "theirs.pth")), source())


def test_bundle_and_safetensors_file_are_read(tmp_path: Path) -> None:
    info = ModelInfo("cifar_resnet8", CLASSES, 32, (0.5,) * 3, (0.5,) * 3, 7, {})
    network = build("cifar_resnet8", 2)
    weights.write(network, info, tmp_path / "model.safetensors")
    check_weights(started(run(tmp_path)), network.state_dict())
    save_file(named("module.", source()), tmp_path / "theirs.safetensors")
    check_weights(started(run(tmp_path / "theirs.safetensors")), source())
    (tmp_path / "MANIFEST.sha256").write_text(f"{'0' * 64}  model.safetensors\n")
    with pytest.raises(InputError, match=r"the bundle /.* is damaged: model\.safetensors"):
        started(run(tmp_path))


@pytest.mark.parametrize("state", [source(5), {n: v for n, v in source().items() if "fc" not in n}])
def test_new_classifier(tmp_path: Path, capsys: pytest.CaptureFixture[str], state: State) -> None:
    torch.save(state, tmp_path / "theirs.pth")
    network = started(run(tmp_path / "theirs.pth"))
    check_weights(network, state, ignored="fc.")
    assert network.get_parameter("fc.weight").shape == (2, 64)
    assert capsys.readouterr().out == "pretrained: a new classifier for 2 classes\n"


def test_a_new_classifier_of_an_efficientnet_starts_near_zero(tmp_path: Path) -> None:
    fields = {"model": "efficientnet_b0", "image_size": 64}
    torch.save(source(5, "efficientnet_b0"), tmp_path / "theirs.pth")
    classifier = started(run(tmp_path / "theirs.pth", **fields)).get_parameter(
        "classifier.1.weight"
    )
    # The initial values of torch: uniform up to 1 / √1280. Its own are uniform up to 1 / √classes.
    assert classifier.abs().max() <= 1280**-0.5


def changed(state: State, name: str, value: Tensor | None) -> State:
    rest = {n: v for n, v in state.items() if n != name}
    return rest if value is None else {**rest, name: value}


CONV = "features.0.weight"


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (source(2, "resnet18"), r"features\.0\.weight is missing \(and 44 more\), .*conv1\.weight"),
        (changed(source(), CONV, None), r"fit cifar_resnet8: features\.0\.weight is missing; set"),
        (changed(source(), CONV, torch.ones(1)), r"0\.weight has the shape \[1\], not \[16, 3,"),
        (source() | {"features.9.x": torch.ones(1)}, r"features\.9\.x is unknown to it; set"),
        (changed(source(), CONV, torch.full((16, 3, 3, 3), torch.nan)), "NaN or infinite"),
        ([1, 2], r"it contains no tensors"),
        ({"args": Fraction(1), "model": source()}, r"weights \(fractions\.Fraction\)"),
        ({"student": source(), "teacher": named("a.", source())}, r"in student and teacher\.a"),
        (named("q.", source()) | named("k.", source()), r"several .* in q and k: save"),
        ({"ema": [[[[[[[[source()]]]]]]]]}, r"it contains no tensors"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, state: Any, line: str) -> None:
    torch.save(state, tmp_path / "theirs.pth")
    with pytest.raises(InputError, match=line) as caught:
        started(run(tmp_path / "theirs.pth"))
    assert len(str(caught.value)) < 400


class Hostile:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("plain", [True, False])
def test_code_in_a_pickle_is_not_run(tmp_path: Path, plain: bool) -> None:
    touched, file = tmp_path / "touched", tmp_path / "theirs.pth"
    if plain:
        file.write_bytes(pickle.dumps({"state_dict": Hostile(touched)}))
    else:
        torch.save({"state_dict": source(), "args": Namespace(a=Hostile(touched))}, file)
    with pytest.raises(InputError, match=r"/theirs\.pth contains "):
        started(run(file))
    assert not touched.exists()


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.pth", b"", "a.pth contains no readable weights"),
        ("a.safetensors", b"\x00" * 9, "a.safetensors contains no readable weights"),
        ("a.pth", b"<!DOCTYPE html>", "a.pth contains no readable weights"),
        ("a.pth", b"<!DOCTYPE html>", "a page of a web server"),
        ("a.pth", b"version https://git-lfs.github.com/spec/v1\n", "git-lfs"),
        ("a.bin", b"\x93NUMPY\1\0" + bytes(99), "NumPy"),
        ("a.bin", b"\x89HDF\r\n\x1a\n" + bytes(99), "Keras"),
        ("a.bin", b"\x1c\0\0\0TFL3" + bytes(99), "TensorFlow Lite"),
        ("a.h5", b"\0", "Keras"),
        ("a.ONNX", b"\x08\x07" + bytes(99), "ONNX"),
        ("a.pkl", pickle.dumps([1.5]), "a pickle of another program"),
        ("model-00001-of-00002.safetensors", b"", "a part of weights"),
        ("a/model.safetensors.index.json", b"{}", "a part of weights"),
        ("a/b", b"", "/a is neither a checkpoint nor a bundle: give pretrained"),
        ("b", b"", "/a is missing: give pretrained"),
    ],
)
def test_no_weights_are_refused(tmp_path: Path, name: str, content: bytes, line: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    path = tmp_path / ("a" if "/" in name or name == "b" else name)
    with pytest.raises(InputError, match=line):
        started(run(path))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_archive_of_numpy_is_named(tmp_path: Path, save: Callable[..., None]) -> None:
    save(tmp_path / "a.npz", weight=np.ones((3, 3)))
    with pytest.raises(InputError, match="NumPy") as raised:
        started(run((tmp_path / "a.npz").rename(tmp_path / "w.pth")))
    assert "PyTorch" not in str(raised.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_program_is_named(tmp_path: Path) -> None:
    torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)).save(tmp_path / "w.pth")  # type: ignore[no-untyped-call]
    with pytest.raises(InputError, match="a program of TorchScript"):
        started(run(tmp_path / "w.pth"))


@pytest.mark.parametrize("cut", [10, 2000, -5])
def test_cut_file_is_not_described_by_torch(tmp_path: Path, cut: int) -> None:
    torch.save(source(), tmp_path / "w.pth")
    (tmp_path / "w.pth").write_bytes((tmp_path / "w.pth").read_bytes()[:cut])
    with pytest.raises(InputError, match="no readable weights") as raised:
        started(run(tmp_path / "w.pth"))
    assert "orch" not in str(raised.value).partition("(")[2].partition(")")[0]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "change",
    [
        Tensor.to_sparse,
        lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
        lambda weight: weight.to(torch.complex64),
        lambda weight: weight.to("meta"),
    ],
)
def test_only_dense_tensors_are_read(tmp_path: Path, change: Callable[[Tensor], Tensor]) -> None:
    torch.save(changed(source(), CONV, change(source()[CONV])), tmp_path / "w.pth")
    with pytest.raises(InputError, match=f"dense tensor on the CPU in {CONV}"):
        started(run(tmp_path / "w.pth"))


def test_compressed_archive_is_refused_before_it_is_read(tmp_path: Path) -> None:
    torch.save(source(), tmp_path / "w.pth")
    with (
        zipfile.ZipFile(tmp_path / "w.pth") as stored,
        zipfile.ZipFile(tmp_path / "c.pth", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))
    with pytest.raises(InputError, match="compressed archive"):
        started(run(tmp_path / "c.pth"))


class _Bomb(dict[str, Any]):
    """Pickled as a call of `print`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("touched",)


@pytest.mark.parametrize(
    ("state", "fields"),
    [
        (_Bomb(), {}),
        ([1], {}),
        ({"ema": None}, {}),
        ({"ema": None, "model": source()}, {"classes": 5}),
        ({"ema": None, "model": source()}, {"config": 5}),
        ({"ema": None, "model": source()}, {"model": [1]}),
    ],
)
def test_hostile_checkpoint_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: Any, fields: dict[str, Any]
) -> None:
    about = checkpoint.manifest_of(run("", model="cifar_resnet8"), CLASSES, epoch=1.0)
    path = checkpoint.write(tmp_path, 1, state, {**about, **fields})
    for read in (lambda: started(run(path)), lambda: checkpoint.load_model(path)):
        with pytest.raises(InputError) as caught:
            read()
        assert "\n" not in str(caught.value)
    assert "touched" not in capsys.readouterr().out


def test_header_of_any_depth_is_refused(tmp_path: Path) -> None:
    metadata = {"model": "cifar_resnet8", "classes": "[" * 200_000}
    save_file(source(), tmp_path / "w.safetensors", metadata)
    with pytest.raises(InputError, match="no readable weights"):
        started(run(tmp_path / "w.safetensors"))


def test_weights_of_torchvision_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    fields = {"model": "squeezenet1_1", "image_size": 64}
    name = "torchvision:DEFAULT"
    path = cached(TORCHVISION["squeezenet1_1"]["DEFAULT"])
    assert path == Path(torch.hub.get_dir(), "checkpoints", path.name)
    path.parent.mkdir(parents=True)
    for _ in ("missing", "of another digest"):
        with pytest.raises(InputError, match=r"ranks download nothing: put https"):
            started(run(name, **fields))
        torch.save(source(1000, "squeezenet1_1"), path)
    # The published file itself is not ours to carry.
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    monkeypatch.setitem(TORCHVISION["squeezenet1_1"], "DEFAULT", f"s-{digest}.pth")
    path.rename(path.with_name(f"s-{digest}.pth"))
    state = source(1000, "squeezenet1_1")
    check_weights(started(run(name, **fields)), state, ignored="classifier.1.")
    for wrong, model in (("torchvision:V9", "squeezenet1_1"), (name, "cifar_resnet8")):
        with pytest.raises(InputError, match=f"has no {wrong[12:]} weights of {model}"):
            started(run(wrong, **fields | {"model": model}))


@pytest.mark.parametrize(
    ("network", "state"),
    [
        ("resnet18", named("module.", source(7, "resnet18"))),
        ("cifar_resnet14", source(2, "cifar_resnet14")),
        ("", {"layer1.weight": torch.ones(3)}),
    ],
)
def test_weights_name_their_network(tmp_path: Path, network: str, state: State) -> None:
    torch.save({"state_dict": state}, tmp_path / "w.pth")
    assert network_of(tmp_path / "w.pth") == network
    assert network_of(saved(tmp_path, "cifar_resnet8")) == "cifar_resnet8"


def test_uri_is_refused() -> None:
    with pytest.raises(InputError, match=r"^pretrained=gs://b/x is a URI"):
        started(run("gs://b/x"))


def test_positions_of_a_vision_transformer_are_resized() -> None:
    from kfp_ddp.training.state.initial_weights import _resized_positions

    positions = {"encoder.pos_embedding": torch.zeros(1, 1 + 2 * 2, 8)}
    resized = _resized_positions(positions, "vit_b_32", 128)
    assert resized["encoder.pos_embedding"].shape == (1, 17, 8)


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("classes", [CLASSES, ("a", "b", "c"), ("b", "a")])
def test_checkpoint_is_read_without_the_classifier_of_other_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], classes: tuple[str, ...], log: bool
) -> None:
    path = saved(tmp_path, "cifar_resnet8")
    network = build("cifar_resnet8", len(classes))
    initialise(network, run(path), classes, log)
    check_weights(network, source(), ignored="fc.")
    kept = torch.equal(network.get_parameter("fc.weight"), source()["fc.weight"])
    assert kept == (classes == CLASSES)
    assert ("new classifier" in capsys.readouterr().out) == (log and classes != CLASSES)


def test_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("cifar_resnet14", {}, "is a cifar_resnet14, not a cifar_resnet8"),
        ("cifar_resnet8", {"blur_pool": True}, "is a cifar_resnet8, not a"),
    ]
    for name, fields, words in cases:
        with pytest.raises(InputError, match=words):
            started(run(saved(tmp_path, name), **fields))


@pytest.mark.parametrize(("micro", "size"), [(1, 32), (2, 32), (1, 64)])
def test_one_value_per_channel_is_refused(micro: int, size: int) -> None:
    fields = {"model": "resnet18", "batch_size": 2 * micro, "micro_batch_size": micro}
    config = run("false", **{**fields, "image_size": size})
    refused = (micro, size) == (1, 32)
    with pytest.raises(InputError, match="batch_size to 4") if refused else nullcontext():
        check_network(config, CLASSES)


def saved(folder: Path, name: str) -> Path:
    about = checkpoint.manifest_of(run("", model=name), CLASSES, epoch=1.0)
    return checkpoint.write(folder, 1, {"model": source(2, name), "ema": None}, about)
