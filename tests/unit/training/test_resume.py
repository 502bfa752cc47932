"""What a run starts from: nothing, its own checkpoint, or the weights of another run."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from kfp_ddp.core import packed
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.pictures.shards import Slices
from kfp_ddp.pictures.splits import Index
from kfp_ddp.training.data.loader import Split
from kfp_ddp.training.distributed import World
from kfp_ddp.training.model.networks import build
from kfp_ddp.training.prepare import resolve
from kfp_ddp.training.spec import model_file
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.state import checkpoint, saving
from tests.training_ranks import run

CLASSES = ("a", "b")
SEPARATE = "a separate classifier group (freeze_epochs, body_lr_factor)"
RECORDED = Path(__file__).parents[1] / "recorded"


def save(output: Path, step: int, by: TrainConfig | None = None, **changed: Any) -> Path:
    more = {"epoch": 1.0, "samples": 4, "metrics": {}, "form": saving.FORM, "images": "1" * 64}
    about = {**checkpoint.manifest_of(by or run(output), CLASSES, **more), **changed}
    return checkpoint.write(output / "checkpoints", step, {"model": {}}, about)


def choose(
    output: Path,
    digest: str = "1" * 64,
    count: int = 4,
    packed: bool = False,
    classes: tuple[str, ...] = CLASSES,
    **fields: Any,
) -> Path | None:
    slices = Slices("/d", ("/d/a.tar",), array("I"), array("Q"), array("Q")) if packed else None
    index = Index(output, classes, ("x",) * count, (0, 1) * (count // 2), slices)
    split = Split(index, None, digest)
    return saving.choose(output / "checkpoints", run(output, **fields), split)


def test_newest_valid_one_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert choose(tmp_path) is None
    assert saving.earlier_config(run(tmp_path)) is None
    save(tmp_path, 1)
    valid = save(tmp_path, 2)
    assert choose(tmp_path) == valid
    assert capsys.readouterr().out == ""
    (save(tmp_path, 3) / "state.pt").write_bytes(b"torn")
    assert choose(tmp_path) == valid
    aside = tmp_path / "checkpoints" / "step-00000003"
    assert f"warning: {aside} is invalid" in capsys.readouterr().out
    assert not aside.exists()


def test_run_does_not_restart_from_scratch_if_no_checkpoint_is_valid(tmp_path: Path) -> None:
    for step in (10, 20):
        (save(tmp_path, step) / "state.pt").write_bytes(b"torn")
    with pytest.raises(StorageError, match=r"^none of the 2 checkpoints in /.*resume=never"):
        choose(tmp_path)
    assert len(checkpoint.steps(tmp_path / "checkpoints")) == 2


@pytest.mark.parametrize(
    ("fields", "difference"),
    [
        ({"saved": {"sampling": "sqrt"}}, "sampling was sqrt and is now uniform"),
        ({"saved": {"freeze_epochs": 1}}, f"{SEPARATE} was True and is now False"),
        ({"model": "resnet18"}, "model was cifar_resnet8 and is now resnet18"),
        ({"blur_pool": True}, "blur_pool was False and is now True"),
        ({"batch_size": 8}, "batch_size was 256 and is now 8"),
        ({"optimizer": "adamw"}, "optimizer was sgd and is now adamw"),
        ({"freeze_epochs": 1}, f"{SEPARATE} was False and is now True"),
        ({"count": 6}, "the number of training images was 4 and is now 6"),
        ({"digest": "2" * 64}, "training images was 111111111111 and is now 222222222222"),
        ({"packed": True, "shuffle_buffer_mb": 7.5}, "shuffle_buffer_mb was 1024.0 and is now 7.5"),
        ({"classes": ("a", "b", "c")}, "the number of classes was 2 and is now 3"),
        ({"classes": ("a", "z")}, "class 1 was 'b' and is now 'z'"),
        ({"shuffle_buffer_mb": 7.5}, ""),
        ({"digest": ""}, ""),
        ({"epochs": 3, "learning_rate": 0.5, "workers": 1, "strategy": "single"}, ""),
    ],
)
def test_another_run_is_refused(tmp_path: Path, fields: dict[str, Any], difference: str) -> None:
    saved = fields.get("saved", {})
    fields = {name: value for name, value in fields.items() if name != "saved"}
    path = save(tmp_path, 1, by=run(tmp_path, **saved))
    if not difference:
        assert choose(tmp_path, **fields) == path
        return
    assert choose(tmp_path, **saved) == path
    with pytest.raises(InputError) as caught:
        choose(tmp_path, **fields)
    message = str(caught.value)
    assert message.startswith(f"cannot resume from {path}: ")
    assert difference in message


def test_file_of_a_model_must_not_change(tmp_path: Path) -> None:
    codes = [packed.pack(f"def build(n): ...{end}".encode()) for end in ("", "#")]
    own: dict[str, Any] = {"model": "mine.py:build", "model_code": codes[0]}
    path = save(tmp_path, 1, by=run(tmp_path, **own))
    assert choose(tmp_path, **own) == path
    was, now = (model_file.digest(code)[:12] for code in codes)
    with pytest.raises(InputError, match=f"model's file was {was} and is now {now};"):
        choose(tmp_path, **{**own, "model_code": codes[1]})


def test_manifest_of_commit_4f70e37_is_read_and_resumed(tmp_path: Path) -> None:
    about = json.loads((RECORDED / "checkpoint_manifest_4f70e37.json").read_text())
    state = {"model": build("cifar_resnet8", 3).state_dict(), "ema": None, "optimizer": {}}
    directory = tmp_path / "checkpoints"
    path = checkpoint.write(directory, about.pop("step"), state, about)
    _, info = checkpoint.load_model(path)
    assert (info.step, info.classes) == (36, ("class0", "class1", "class2"))
    split = Split(Index(tmp_path, info.classes, ("x",) * 96, (0, 1, 2) * 32), None)
    config = TrainConfig.create(**{**about["config"], "output_dir": str(tmp_path)})
    assert saving.choose(directory, config, split) == path
    unset = run(tmp_path, image_size=8, epochs=3)
    resolved = resolve(unset, World(0, 2, 0, 2, torch.device("cpu")), 96)
    assert saving.choose(directory, resolved, split) == path
    batches = (resolved.batch_size, resolved.micro_batch_size, resolved.warmup_epochs)
    assert batches == (8, 4, 1.0)


@pytest.mark.parametrize("form", ["replicated", "ddp, single or one rank"])
def test_a_complete_state_is_resumed(tmp_path: Path, form: str) -> None:
    """Early checkpoints have a text in place of the key."""
    path = save(tmp_path, 10, form=form)
    assert choose(tmp_path) == path


@pytest.mark.parametrize("form", ["sharded", "fsdp over several ranks", "other"])
def test_another_form_of_the_state_is_refused(tmp_path: Path, form: str) -> None:
    save(tmp_path, 9)
    path = save(tmp_path, 10, form=form)
    with pytest.raises(InputError, match=rf"{form}.*fsdp.*output_dir and pretrained={path}$"):
        choose(tmp_path)


@pytest.mark.parametrize(("count", "continues"), [(None, False), ("0", False), ("1", True)])
def test_restarts_of_plain_torchrun_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: str | None, continues: bool
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    if count is not None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    assert saving.continues(run(tmp_path, resume="never"), [""]) is continues
    assert not saving.continues(run(tmp_path), [""])


@pytest.mark.parametrize(
    ("run_id", "launches", "continues"),
    [
        ("", ["b", "c"], True),  # a node was lost, another joined
        ("", ["c"], False),  # a separate start
        ("", [""], False),
        ("run/train", ["c"], True),  # another attempt of the same step
        ("other/train", ["a"], False),
    ],
)
def test_resume_never_is_for_the_first_start_only(
    tmp_path: Path, run_id: str, launches: list[str], continues: bool
) -> None:
    first = run(tmp_path, resume="never", run_id="run/train" if run_id else "")
    saving.begin(first, ["a", "b"])
    save(tmp_path, 10)
    assert saving.continues(run(tmp_path, resume="never", run_id=run_id), launches) is continues
    assert not saving.continues(run(tmp_path, run_id=run_id), launches)
    assert saving.earlier_config(run(tmp_path, resume="never")) is None
    earlier = saving.earlier_config(run(tmp_path))
    assert earlier is not None
    assert earlier["model"] == "cifar_resnet8"


def test_start_records_its_launchers_or_its_run(tmp_path: Path) -> None:
    record, config = tmp_path / "begun-by", tmp_path / "config.json"
    config.write_text("{}")
    config.with_name("before").hardlink_to(config)
    saving.begin(run(tmp_path), ["b", "a"])
    assert config.with_name("before").read_text() == "{}", "replaced, never half written"
    assert TrainConfig.create(**json.loads(config.read_text())) == run(tmp_path)
    assert not record.exists()
    saving.begin(run(tmp_path, resume="never"), ["b", "", "a", "b"])
    assert record.read_text() == "a\nb"
    assert not list(tmp_path.glob("checkpoints*"))
    saving.begin(run(tmp_path, resume="never", run_id="me"), ["a"])
    assert record.read_text() == "me"


def test_start_from_scratch_moves_earlier_checkpoints_to_a_free_name(tmp_path: Path) -> None:
    for number in range(4):
        save(tmp_path, number)
        saving.begin(run(tmp_path, resume="never"), [str(number)])
        if number == 1:
            (tmp_path / "checkpoints.old-0").rename(tmp_path / "moved")
    names = sorted(path.name for path in tmp_path.glob("checkpoints*"))
    assert names == ["checkpoints.old-0", "checkpoints.old-1", "checkpoints.old-2"]
    assert choose(tmp_path) is None
    assert checkpoint.newest_valid(tmp_path / "checkpoints.old-2") is not None
