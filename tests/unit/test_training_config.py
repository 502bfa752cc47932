"""One configuration for pipeline, launcher and loop; bad values are one line."""

import subprocess
import sys
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.flags import parse

REQUIRED = {"data": "/d", "output_dir": "/o"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"epochs": 0}, ("epochs=0", "greater than or equal to 1")),
        ({"model": "resnet5"}, ("model='resnet5'", "torchvision", "did you mean 'resnet50'")),
        ({"epocs": 3}, ("'epocs'", "did you mean 'epochs'")),
        ({"epochs": 3, "warmup_epochs": 3}, ("warmup_epochs=3", "epochs=3", "lower")),
        ({"batch_size": 10, "micro_batch_size": 3}, ("batch_size=10", "micro_batch_size=3")),
        ({"start_image_size": 300}, ("start_image_size=300", "224")),
        ({"strategy": "fsdp", "ema_decay": 0.9}, ("ema_decay", "strategy=ddp")),
        ({"strategy": "fsdp", "compile": True}, ("compile", "strategy=ddp")),
    ],
)
def test_invalid_value_is_one_line(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        TrainConfig.create(**{**REQUIRED, **fields})
    for word in words:
        assert word in str(caught.value)


def test_json_and_flags_restore_the_configuration() -> None:
    run = TrainConfig.create(
        **REQUIRED, model="resnet18", deterministic=True, blur_pool=False, learning_rate=1e-5
    )
    assert TrainConfig.from_json(run.to_json()) == run
    assert parse(run.to_argv()) == run


def test_flags_have_only_the_fields_that_were_set() -> None:
    """What nobody set must still be known as such by the ranks, where it may yield."""
    run = TrainConfig.create(**REQUIRED, epochs=3, batch_size=256, tensorboard=False)
    assert run.to_argv() == [
        *("--data", "/d", "--output-dir", "/o", "--epochs", "3", "--batch-size", "256"),
        "--no-tensorboard",
    ]
    again = parse(run.to_argv())
    assert again.model_fields_set == run.model_fields_set == set(run.given())
    other_forms = parse(
        ["--data=/d", "--output_dir", "/o", "--pretrained", "epochs=2", "--compile"]
    )
    assert other_forms.model_fields_set == {"data", "output_dir", "pretrained", "compile"}


@pytest.mark.parametrize(
    ("fields", "warmup"),
    [
        ({}, 5.0),
        ({"epochs": 3}, 0.3),
        ({"epochs": 1}, 0.1),
        ({"epochs": 200}, 5.0),
        ({"epochs": 3, "warmup_epochs": 2.5}, 2.5),
        ({"epochs": 3, "warmup_epochs": 0}, 0),
        ({"micro_batch_size": 3}, 5.0),  # does not divide the default batch size
    ],
)
def test_default_warm_up_follows_the_epochs(fields: dict[str, Any], warmup: float) -> None:
    run = TrainConfig.create(**REQUIRED, **fields)
    assert run.warmup_epochs == pytest.approx(warmup)
    assert parse(run.to_argv()) == run
    assert "warmup_epochs" in run.to_json()


@pytest.mark.parametrize(
    "address",
    [
        *("https://ana:s3cr3t@example.com/w.pth", "https://s3cr3t@example.com/w.pth"),
        *("https://example.com/w.pth?X-Amz-Signature=s3cr3t", "http://example.com/w.pth#s3cr3t"),
        *("s3://bucket/w.pth?sig=s3cr3t", "gs://s3cr3t@bucket/w.pth", "az://b/w.pth#s3cr3t"),
    ],
)
def test_address_with_a_secret_is_refused_and_not_shown(address: str) -> None:
    with pytest.raises(InputError, match=r"^pretrained has a login or a query in it") as caught:
        TrainConfig.create(**REQUIRED, pretrained=address)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("address", ["https://e.com/a@b.pth", "gs://b/a@c.pth", "/a@b?.pth"])
def test_odd_names_of_weights_are_accepted(address: str) -> None:
    assert TrainConfig.create(**REQUIRED, pretrained=address).pretrained == address


@pytest.mark.parametrize("text", ["{", "[]", '{"data": "/d", "output_dir": "/o", "x": 1}'])
def test_invalid_json_is_one_line(text: str) -> None:
    with pytest.raises(InputError):
        TrainConfig.from_json(text)


def test_unknown_flag_has_a_hint() -> None:
    with pytest.raises(InputError, match=r"--epocs; did you mean 'epochs'"):
        parse(["--data", "/d", "--output-dir", "/o", "--epocs", "3"])


def test_launcher_does_not_import_torch() -> None:
    probe = "import sys, kfp_ddp.training.node; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
