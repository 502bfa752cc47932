"""What a run begins with: nothing, its own checkpoint after a restart, or another run's weights."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.training import checkpoint, model_file, resume
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.initial_weights import initialise
from kfp_ddp.training.manifest import DIGEST
from kfp_ddp.training.model import build
from kfp_ddp.training.shards import Slices
from kfp_ddp.training.splits import Index
from kfp_ddp.training.strategies import Ddp, Fsdp

CLASSES = ("a", "b")
APART = "a separate classifier group (freeze_epochs, body_lr_factor)"
NEW_SETTINGS = (
    *("model_code", "optimizer", "freeze_epochs", "body_lr_factor", "shuffle_buffer_mb"),
    *("class_weights", "mixup", "cutmix"),
)
"""Of which a checkpoint of before them says nothing."""


def run(output: Path, **fields: Any) -> TrainConfig:
    settings: dict[str, Any] = {"data": "/d", "output_dir": str(output), "image_size": 16}
    return TrainConfig.create(**{**settings, "model": "cifar_resnet8", **fields})


def save(
    output: Path, step: int, state: Any = None, by: TrainConfig | None = None, **changed: Any
) -> Path:
    more = {"epoch": 1.0, "samples": 4, "metrics": {}, "form": Ddp.form, "images": "1" * 64}
    about = {**checkpoint.manifest_of(by or run(output), CLASSES, **more), **changed}
    return checkpoint.write(output / "checkpoints", step, state or {"model": {}}, about)


def chosen(
    output: Path, digest: str = "1" * 64, count: int = 4, packed: bool = False, **fields: Any
) -> Path | None:
    slices = Slices("/d", ("/d/a.tar",), array("I"), array("Q"), array("Q")) if packed else None
    index = Index(output, CLASSES, ("x",) * count, (0, 1) * (count // 2), slices)
    return resume.choose(output / "checkpoints", run(output, **fields), index, Ddp.form, digest)


def test_where_nothing_was_saved_a_run_begins(tmp_path: Path) -> None:
    assert chosen(tmp_path) is None
    assert resume.earlier_config(run(tmp_path)) is None


def test_the_newest_is_chosen_and_one_that_is_damaged_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1)
    whole = save(tmp_path, 2)
    assert chosen(tmp_path) == whole
    assert capsys.readouterr().out == ""
    (save(tmp_path, 3) / "state.pt").write_bytes(b"torn")
    assert chosen(tmp_path) == whole
    aside = tmp_path / "checkpoints" / "step-00000003"
    assert capsys.readouterr().out == (f"warning: {aside} is invalid and was set aside\n")
    assert not aside.exists()


def test_none_that_verifies_is_not_none_at_all(tmp_path: Path) -> None:
    (save(tmp_path, 3) / "state.pt").write_bytes(b"torn")
    with pytest.raises(StorageError, match=r"^none of the 1 checkpoints in /.*resume=never"):
        chosen(tmp_path)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model": "resnet18"}, "model was cifar_resnet8 and is now resnet18"),
        ({"blur_pool": True}, "blur_pool was False and is now True"),
        ({"image_size": 17}, "image_size was 16 and is now 17"),
        ({"batch_size": 8}, "batch_size was 256 and is now 8"),
        ({"seed": 5}, "seed was 0 and is now 5"),
        ({"optimizer": "adamw"}, "optimizer was sgd and is now adamw"),
        ({"freeze_epochs": 1}, f"{APART} was False and is now True"),
        ({"body_lr_factor": 0.1}, f"{APART} was False and is now True"),
        ({"shuffle_buffer_mb": 7.5, "packed": True}, "shuffle_buffer_mb was 1024.0 and is now 7.5"),
        ({"shuffle_buffer_mb": 7.5}, ""),
        ({"count": 6}, "the number of training images was 4 and is now 6"),
        ({"digest": "2" * 64}, "training images was 111111111111 and is now 222222222222"),
        ({"learning_rate": 3.0, "weight_decay": 0.5, "epochs": 99, "workers": 0}, ""),
        ({"digest": ""}, ""),
    ],
)
def test_what_may_change_and_what_may_not(
    tmp_path: Path, fields: dict[str, Any], told: str
) -> None:
    path = save(tmp_path, 1)
    if not told:
        assert chosen(tmp_path, **fields) == path
        return
    with pytest.raises(InputError) as caught:
        chosen(tmp_path, **fields)
    said = str(caught.value)
    assert said.startswith(f"cannot resume from {path}: ")
    assert said.endswith(f"{told}; use another output_dir, or resume=never to start from scratch")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"optimizer": "adamw"}, "optimizer was adamw and is now sgd"),
        ({"freeze_epochs": 1}, f"{APART} was True and is now False"),
        ({"body_lr_factor": 0.1}, f"{APART} was True and is now False"),
    ],
)
def test_what_a_checkpoint_was_saved_with_is_asked_for_again(
    tmp_path: Path, fields: dict[str, Any], told: str
) -> None:
    path = save(tmp_path, 1, by=run(tmp_path, **fields))
    assert chosen(tmp_path, **fields) == path
    with pytest.raises(InputError) as caught:
        chosen(tmp_path)
    assert f": {told};" in str(caught.value)


def test_the_file_of_a_model_may_not_change(tmp_path: Path) -> None:
    codes = [
        model_file.pack(_file(tmp_path / name, text)) for name, text in (("a", ""), ("b", "#"))
    ]
    mine: dict[str, Any] = {"model": "mine.py:build", "model_code": codes[0]}
    path = save(tmp_path, 1, by=run(tmp_path, **mine))
    assert chosen(tmp_path, **mine) == path
    was, now = (model_file.digest(code)[:12] for code in codes)
    told = f": the digest of the model's file was {was} and is now {now};"
    with pytest.raises(InputError, match=told):
        chosen(tmp_path, **{**mine, "model_code": codes[1]})


def _file(path: Path, more: str) -> str:
    path.write_text(f"def build(classes): {more}\n    return None\n")
    return str(path)


def test_what_a_checkpoint_of_before_a_setting_was_made_with_is_its_default(tmp_path: Path) -> None:
    config = dict(checkpoint.manifest_of(run(tmp_path), CLASSES, epoch=1.0, samples=4)["config"])
    config = {name: value for name, value in config.items() if name not in NEW_SETTINGS}
    path = save(tmp_path, 1, config=config)
    assert chosen(tmp_path) == path
    assert chosen(tmp_path, packed=True, shuffle_buffer_mb=7.5) == path


def test_an_earlier_checkpoint_that_tells_no_digest_is_chosen(tmp_path: Path) -> None:
    path = save(tmp_path, 1, images="")
    assert chosen(tmp_path) == path
    fields = json.loads((path / "manifest.json").read_text())
    made = ("step", "files", DIGEST, "images")
    about = {name: value for name, value in fields.items() if name not in made}
    path = checkpoint.write(tmp_path / "checkpoints", 2, {"model": {}}, about)
    assert "images" not in checkpoint.verify(path).manifest
    assert chosen(tmp_path) == path


def test_a_form_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1, form="other")
    with pytest.raises(InputError, match="strategy was None and is now ddp, single or one rank"):
        chosen(tmp_path)
    index = Index(tmp_path, CLASSES, ("x",) * 4, (0, 1) * 2)
    with pytest.raises(InputError, match="is now fsdp over several ranks"):
        resume.choose(tmp_path / "checkpoints", run(tmp_path), index, Fsdp.form)


@pytest.mark.parametrize(("count", "goes_on"), [(None, False), ("0", False), ("1", True)])
def test_under_torchrun_its_count_of_restarts_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: str | None, goes_on: bool
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    if count is not None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    assert resume.continues(run(tmp_path, resume="never"), [""]) is goes_on
    assert not resume.continues(run(tmp_path), [""])


def test_a_start_notes_who_it_is(tmp_path: Path) -> None:
    noted = tmp_path / "begun-by"
    resume.begin(run(tmp_path), ["b", "a"])
    assert not noted.exists()
    resume.begin(run(tmp_path, resume="never"), ["b", "", "a", "b"])
    assert noted.read_text() == "a\nb"
    assert not list(tmp_path.glob("checkpoints*"))
    assert resume.continues(run(tmp_path, resume="never"), ["a"])
    resume.begin(run(tmp_path, resume="never", run_id="me"), ["a"])
    assert noted.read_text() == "me"
    save(tmp_path, 1)
    assert resume.earlier_config(run(tmp_path, resume="never")) is None
    earlier = resume.earlier_config(run(tmp_path))
    assert earlier is not None
    assert earlier["model"] == "cifar_resnet8"


@pytest.mark.parametrize("say", [True, False])
@pytest.mark.parametrize("classes", [CLASSES, ("a", "b", "c"), ("b", "a")])
def test_weights_are_taken_over_but_for_the_classifier_of_other_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], classes: tuple[str, ...], say: bool
) -> None:
    torch.manual_seed(1)
    source = build("cifar_resnet8", 2)
    path = save(tmp_path / "from", 1, {"model": source.state_dict(), "ema": None})
    network = build("cifar_resnet8", len(classes))
    own = network.state_dict()["fc.weight"].clone()
    initialise(network, run(tmp_path, init_from=str(path)), classes, say)
    theirs, mine = source.state_dict(), network.state_dict()
    for name, value in theirs.items():
        assert name.startswith("fc.") or torch.equal(value, mine[name])
    if classes == CLASSES:
        assert torch.equal(mine["fc.weight"], theirs["fc.weight"])
        assert capsys.readouterr().out == ""
        return
    assert torch.equal(mine["fc.weight"], own)
    told = f"init_from: a new classifier for {len(classes)} classes\n"
    assert capsys.readouterr().out == (told if say else "")


def test_weights_of_a_network_with_other_filters_are_refused(tmp_path: Path) -> None:
    state = {"model": build("cifar_resnet8", 2).state_dict(), "ema": None}
    path = save(tmp_path / "from", 1, state)
    blurred = run(tmp_path, init_from=str(path), blur_pool=True)
    with pytest.raises(InputError, match=r"^init_from=/.* is a cifar_resnet8, not a"):
        initialise(build("cifar_resnet8", 2, blur_pool=True), blurred, CLASSES, log=False)
