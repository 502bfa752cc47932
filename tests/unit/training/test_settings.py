"""Settings of a training: checks, batches and the command of the workers."""

import json
import os
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.machine import GPUS
from kfp_ddp.evaluation.bulk_rank import predict_share
from kfp_ddp.evaluation.evaluator import Evaluator
from kfp_ddp.jobs import local
from kfp_ddp.runs.train.engine import node_command, with_timeout
from kfp_ddp.training import distributed, node, own_script
from kfp_ddp.training.distributed import World
from kfp_ddp.training.prepare import precision_of, resolve
from kfp_ddp.training.spec.config import TrainConfig, parse
from kfp_ddp.training.spec.recipes import RECIPES, RecipeName, configured
from kfp_ddp.training.spec.recipes import main as recipes_main
from kfp_ddp.training.state import checkpoint, learner
from tests.training_ranks import run

REQUIRED = {"data": "/d", "output_dir": "/o"}
PIECES = ("$", "$$", "(HOME)", "$(HOME)", "$$(A)", "a", "/", " ", "{", "}", "(", ")", "'", '"', "ä")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"epochs": 0}, ("epochs=0", "greater than or equal to 1")),
        ({"model": "resnet5"}, ("model='resnet5'", "torchvision", "did you mean 'resnet50'")),
        ({"epocs": 3}, ("'epocs'", "did you mean 'epochs'")),
        ({"epochs": 3, "warmup_epochs": 3}, ("warmup_epochs=3", "epochs=3", "lower")),
        ({"batch_size": 10, "micro_batch_size": 3}, ("batch_size=10", "micro_batch_size=3")),
        ({"start_image_size": 300}, ("start_image_size=300", "224")),
        ({"strategy": "fsdp"}, ("strategy='fsdp'", "ddp, single")),
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
    assert TrainConfig.create(**json.loads(run.model_dump_json())) == run
    assert parse(run.to_argv()) == run


def test_flags_have_only_the_fields_that_were_set() -> None:
    """What nobody set must still be known as such by the ranks, where it may yield."""
    run = TrainConfig.create(**REQUIRED, epochs=3, batch_size=256, tensorboard=False)
    assert run.to_argv() == [
        *("--data", "/d", "--output-dir", "/o", "--epochs", "3", "--batch-size", "256"),
        "--no-tensorboard",
    ]
    again = parse(run.to_argv())
    assert again.model_fields_set == run.model_fields_set == set(run.explicit())
    others = parse(["--data=/d", "--output_dir", "/o", "--pretrained", "epochs=2", "--compile"])
    assert others.model_fields_set == {"data", "output_dir", "pretrained", "compile"}


@pytest.mark.parametrize(
    ("fields", "warmup"),
    [
        ({}, 5.0),
        ({"epochs": 3}, 0.3),
        ({"epochs": 1}, 0.1),
        ({"epochs": 3, "warmup_epochs": 2.5}, 2.5),
        ({"epochs": 3, "warmup_epochs": 0}, 0),
        ({"micro_batch_size": 3}, 5.0),  # does not divide the default batch size
    ],
)
def test_default_warm_up_follows_the_epochs(fields: dict[str, Any], warmup: float) -> None:
    run = TrainConfig.create(**REQUIRED, **fields)
    assert run.warmup_epochs == pytest.approx(warmup)
    assert parse(run.to_argv()) == run


@pytest.mark.parametrize(
    "address",
    [
        *("https://ana:s3cr3t@example.com/w.pth", "https://s3cr3t@example.com/w.pth"),
        *("https://example.com/w.pth?X-Amz-Signature=s3cr3t", "http://example.com/w.pth#s3cr3t"),
        *("https://e.com/w?download=true&key=s3cr3t", "https://e.com/w?dl=1#s3cr3t"),
        *("s3://bucket/w.pth?sig=s3cr3t", "gs://s3cr3t@bucket/w.pth", "az://b/w.pth#s3cr3t"),
    ],
)
def test_address_with_a_secret_is_refused_and_not_shown(address: str) -> None:
    with pytest.raises(InputError, match=r"^pretrained has a login or a query in it") as caught:
        TrainConfig.create(**REQUIRED, pretrained=address)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        *("https://e.com/a@b.pth", "gs://b/a@c.pth", "/a@b?.pth"),
        *("https://e.com/w?download=true", "https://e.com/w?dl=1&raw=true"),
    ],
)
def test_odd_names_of_weights_are_accepted(address: str) -> None:
    assert TrainConfig.create(**REQUIRED, pretrained=address).pretrained == address


def test_unknown_flag_has_a_hint() -> None:
    with pytest.raises(InputError, match=r"--epocs; did you mean 'epochs'"):
        parse(["--data", "/d", "--output-dir", "/o", "--epocs", "3"])


def test_launcher_does_not_import_torch() -> None:
    probe = "import sys, kfp_ddp.training.node; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


def world(size: int) -> World:
    return World(0, size, 0, size, torch.device("cpu"))


@pytest.mark.parametrize(
    ("fields", "ranks", "words"),
    [
        ({"batch_size": 9}, 2, "batch_size=9 cannot be divided evenly among 2 ranks; use"),
        ({"batch_size": 12, "micro_batch_size": 4}, 2, "among 2 ranks with micro_batch_size=4"),
        ({"micro_batch_size": 64}, 2, "batch_size=128 but only 96 training images"),
        ({"batch_size": 8}, 97, "97 ranks but only 96 training images"),
        ({"strategy": "single", "batch_size": 8}, 2, "strategy=single but 2 ranks"),
    ],
)
def test_indivisible_batch(tmp_path: Path, fields: dict[str, Any], ranks: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        resolve(run(tmp_path, **fields), world(ranks), 96)


def test_batch_per_rank_scales_the_rate_and_is_kept_on_resume(tmp_path: Path) -> None:
    config = run(tmp_path, batch_size_per_rank=8, lr_reference_batch=16, learning_rate=0.1)
    resolved = resolve(config, world(4), 96)
    assert (resolved.batch_size, resolved.micro_batch_size) == (32, 8)
    assert learner.peak(resolved) == pytest.approx(0.2)
    manifest = checkpoint.manifest_of(resolved, ("a", "b"), epoch=1, world_size=4)
    checkpoint.write(tmp_path / "checkpoints", 5, {}, manifest)
    fewer = resolve(config, world(2), 96)
    assert (fewer.batch_size, fewer.micro_batch_size) == (32, 8)


@pytest.mark.parametrize(
    ("fields", "ranks", "images", "batch", "micro"),
    [
        *(({}, 1, 1000, 256, 256), ({}, 2, 97, 96, 48), ({}, 5, 7, 5, 1), ({}, 512, 1000, 512, 1)),
        *(({"micro_batch_size": 10}, 2, 97, 80, 10), ({"micro_batch_size": 64}, 8, 1000, 512, 64)),
    ],
)
def test_default_batch_size_is_adapted_and_printed(
    fields: dict[str, Any],
    ranks: int,
    images: int,
    batch: int,
    micro: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    resolved = resolve(run(tmp_path, **fields), world(ranks), images)
    assert (resolved.batch_size, resolved.micro_batch_size) == (batch, micro)
    assert (f"batch_size is {batch}, not 256" in capsys.readouterr().out) == (batch != 256)


def test_settings_that_are_not_set_stay_as_in_the_checkpoint(tmp_path: Path) -> None:
    """A version with other defaults, or another number of ranks, resumes with the same batches."""
    earlier = run(tmp_path, batch_size=64, epochs=20, warmup_epochs=5).model_copy(
        update={"micro_batch_size": 16}
    )
    manifest = checkpoint.manifest_of(earlier, ("a", "b"), epoch=1, world_size=4)
    checkpoint.write(tmp_path / "checkpoints", 5, {}, manifest)
    resolved = resolve(run(tmp_path, epochs=20), world(2), 96)
    batches = (resolved.batch_size, resolved.micro_batch_size, resolved.warmup_epochs)
    assert batches == (64, 16, 5)
    assert resolve(run(tmp_path, epochs=5), world(2), 96).warmup_epochs == 0.5
    changed = resolve(run(tmp_path, epochs=20, batch_size=32, warmup_epochs=1), world(2), 96)
    assert (changed.batch_size, changed.warmup_epochs) == (32, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_missing_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no GPU"):
        distributed._device(run(tmp_path, device="cuda"), 0, 1, 1)
    assert distributed._device(run(tmp_path), 0, 4, 4).type == "cpu"
    monkeypatch.setenv(GPUS, "4")  # a pod that requested some does not train on its CPUs
    with pytest.raises(InputError, match=r"requested 4 GPU.*runtime_class"):
        distributed._device(run(tmp_path), 0, 4, 4)
    assert distributed._device(run(tmp_path, device="cpu"), 0, 4, 4).type == "cpu"
    monkeypatch.delenv(GPUS)
    limits = {"limits": {"cpu": "1", "nvidia.com/mig-1g.10gb": "2"}}
    pod = {"spec": {"containers": [{"name": "wait"}, {"resources": limits}]}}
    monkeypatch.setattr(local, "step_pods", lambda: [pod])
    assert (local.local_gpus(3), local.local_gpus()) == (3, 1)
    settings = mock.Mock(data=str(tmp_path), output_dir=str(tmp_path), device="auto")
    for start in (predict_share, own_script.run, lambda request: Evaluator(request, "c", None)):
        with pytest.raises(InputError, match="requested 2 GPU"):
            start(settings)


@pytest.mark.parametrize(
    ("capability", "precision"), [((8, 0), "bf16"), ((7, 5), "fp16"), ((6, 1), "fp32")]
)
def test_precision_by_the_hardware(
    capability: tuple[int, int], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: capability >= (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    assert distributed.half_precision(torch.device("cuda")) == precision
    ranks = mock.Mock(device=torch.device("cuda"), gather=lambda mine: [mine, "fp16"])
    agreed = precision_of(run(), ranks)
    assert agreed == ("fp16" if precision == "fp16" else "fp32"), "what each of them has"


@pytest.mark.parametrize(
    ("cpus", "mode"), [([{0, 1}, {2, 3}], "node"), ([{0, 1}, {0, 1}], None), ([{0, 1, 2, 3}], None)]
)
def test_ranks_are_bound_to_cpus_near_their_gpus_if_none_idles(
    cpus: list[set[int]], mode: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank whose GPU is missing is not bound either."""
    came, near = mock.Mock(), lambda device_index, **_: cpus[device_index]
    for number in range(2):
        (tmp_path / f"node{number}").mkdir()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(node, "NUMA", tmp_path)
    monkeypatch.setattr(node, "_stop_on_signals", came)
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/numactl")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr("torch.numa.binding._get_logical_cpus_to_bind_to", near)
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", came)
    flags = ["--nproc-per-node=2", f"--log-dir={tmp_path}", "-m", "kfp_ddp.training"]
    assert node._supervise(get_args_parser().parse_args(flags), str, tmp_path, print) == 0
    options = came.call_args_list[1].args[0].numa_options
    assert (options and options.affinity_mode.value) == mode


def test_recipes_are_complete_configurations() -> None:
    assert tuple(RECIPES) == typing.get_args(RecipeName)
    for name in RECIPES:
        configured(name, {**REQUIRED, "pretrained": "/c"})
        assert configured(name, {**REQUIRED, "pretrained": "/c", "epochs": 1}).epochs == 1
    assert configured("none", REQUIRED) == TrainConfig.create(**REQUIRED)
    for name, fields, words in (
        ("mnist", {}, "use one of auto, none, digits, cifar"),
        ("finetune", {"pretrained": False}, "needs initial weights"),
        ("digits", {"epochs": 1, "warmup_epochs": 2}, "warmup_epochs=2 leaves nothing of epochs=1"),
    ):
        with pytest.raises(InputError, match=words):
            configured(name, {**REQUIRED, **fields})


def test_initial_weights_are_fine_tuned_unless_another_recipe_is_set() -> None:
    fields = {**REQUIRED, "pretrained": "w"}
    tuned = configured("none", fields)
    assert (tuned.freeze_epochs, tuned.body_lr_factor, tuned.keep_best) == (1, 0.1, True)
    assert tuned == configured("finetune", fields)
    assert configured("cifar", fields).freeze_epochs == 0
    for random in ("auto", False, ""):
        assert configured("none", {**REQUIRED, "pretrained": random}).freeze_epochs == 0
    assert configured("finetune", REQUIRED).pretrained == "true"
    assert configured("none", {**REQUIRED, "init_from": "w"}) == tuned  # its former name


def test_another_optimizer_has_rates_of_its_own() -> None:
    adamw = configured("imagenet-90", {**REQUIRED, "optimizer": "adamw", "weight_decay": 0.05})
    assert (adamw.learning_rate, adamw.lr_reference_batch, adamw.weight_decay) == (1e-3, 0, 0.05)
    assert adamw.warmup_epochs == 8
    assert configured("imagenet-90", {**REQUIRED, "optimizer": "sgd"}).learning_rate == 0.256


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ("digits", {}),
        ("digits --epochs 4", {"epochs": 4}),  # fewer than the warm-up of no recipe
        ("imagenet-fast --no-blur-pool --epochs 90", {"blur_pool": False, "epochs": 90}),
        ("finetune --pretrained=/c", {"pretrained": "/c"}),
    ],
)
def test_flags(flags: str, fields: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert recipes_main([*flags.split(), "--data", "/d", "--output-dir", "/o"]) == 0
    expected = configured(flags.split()[0], {**REQUIRED, **fields})
    config = parse(capsys.readouterr().out.split())
    assert config == expected
    assert config.model_fields_set == expected.model_fields_set


def test_value_that_a_shell_would_change_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert recipes_main(["digits", "--data", "/a folder", "--output-dir", "/o"]) == 2
    assert "'/a folder' does not pass through a shell" in capsys.readouterr().err
    assert recipes_main(["digits", "--epocs", "3"]) == 2
    assert recipes_main(["mnist"]) == 2


def expanded(word: str) -> str:
    """A word of a command as Kubernetes makes it where every variable is set."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda result: (result[1] and "VALUE") or "$", word)


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_kubernetes_expands_nothing_in_the_command(name: str) -> None:
    config = TrainConfig(data=f"/data/{name}", output_dir="/work/$(RUN)", run_id="$$")
    words = node_command(config)
    assert [expanded(word) for word in words[4:]] == config.to_argv()


@pytest.mark.parametrize(
    ("training", "job", "minutes"),
    [
        ({}, {}, None),
        ({}, {"nccl_timeout_minutes": 30}, 30),
        ({"timeout_minutes": 30}, {"nccl_timeout_minutes": 30.0}, 30),
        ({"timeout_minutes": 5}, {"nccl_timeout_minutes": 0}, 5),
    ],
)
def test_time_out_is_that_of_the_collectives(training: Any, job: Any, minutes: Any) -> None:
    assert with_timeout(training, job).get("timeout_minutes") == minutes


def test_two_time_outs_are_one_line() -> None:
    with pytest.raises(InputError, match="which are one time-out: give one of them"):
        with_timeout({"timeout_minutes": 5}, {"nccl_timeout_minutes": 10})
