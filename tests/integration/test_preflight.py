"""What can be known before a byte moves is said then, in one line."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kfp_ddp.components.data_sync.component import data_sync
from kfp_ddp.components.preflight.component import preflight
from kfp_ddp.components.train.component import train
from kfp_ddp.pipelines.train_resnet import train_resnet
from tests.gcs_server import Bucket

GOOD: dict[str, Any] = {"source": "gs://bucket/ds", "backend": "local", "destination": ""}


@pytest.fixture
def summary(tmp_path: Path) -> SimpleNamespace:
    return SimpleNamespace(path=str(tmp_path / "summary.md"))


def check(summary: SimpleNamespace, **given: Any) -> str:
    folders = {"data_dir": "/data", "work_dir": "/work"}
    said: str = preflight.python_func(summary=summary, **{**GOOD, **folders, **given})
    return said


def test_good_parameters_are_told_in_one_line(summary: SimpleNamespace) -> None:
    said = check(summary, model="resnet18", epochs=12, training={"precision": "bf16"})
    assert said == "resnet18 at 224 px, 12 epochs, batch 256, local"
    assert said in Path(summary.path).read_text()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"source": "ftp://host/ds"}, "unknown scheme"),
        ({"dataset": "Flowers"}, "dataset is 'Flowers'; give at most 40 lower-case letters"),
        ({"sync": {"max_delet": 1.0}}, "the sync has no setting 'max_delet'; it has "),
        ({"sync": {"max_delete": 2.0}}, "max_delete is 2; give 0 to 1"),
        ({"sync": {"dry_run": True}}, "sync sets dry_run, which leaves nothing to train on"),
        ({"sync": {"pack": "tar"}}, "sync sets pack to 'tar'; training reads files"),
        ({"publish": "copy"}, "publish is 'copy'; give one of auto"),
        ({"publish": "populator", "source": "s3://bucket/ds"}, "the populator needs gs://"),
        ({"backend": "slurm"}, "backend 'slurm' is not known"),
        ({"nodes": 2}, "nodes=2: backend local has one node"),
        ({"nproc_per_node": -1}, "nproc_per_node=-1"),
        ({"model": "resnet51"}, "model"),
        ({"epochs": 3}, "warmup_epochs=5 leaves nothing of epochs=3"),
        ({"training": {"precison": "bf16"}}, "precison"),
        ({"training": {"output_dir": "/x"}}, "training sets output_dir, which the step sets"),
        ({"epochs": 30, "training": {"epochs": 20}}, "epochs is given twice: 30 as an input"),
        ({"cluster": {"command": ["x"]}}, "cluster sets command, which the step sets"),
        ({"min_accuracy": 70}, "min_accuracy=70 cannot be used: it should be"),
        ({"min_improvement": 0.01}, "min_improvement is set but champion is empty"),
        ({"keep_runs": -1}, "keep_runs is -1; give 0 (all) or more"),
        ({"model_name": "../model"}, "model_name is '../model'"),
        ({"destination": "s3://bucket/x"}, "s3://bucket/x cannot be used: give gs://"),
        ({"destination": "gs://absent/x"}, "the bucket gs://absent is not there"),
        ({"champion": "gs://absent/x"}, "the bucket gs://absent is not there"),
    ],
)
def test_what_would_fail_after_the_training_fails_at_once(
    bucket: Bucket, summary: SimpleNamespace, given: dict[str, Any], why: str
) -> None:
    with pytest.raises(SystemExit) as raised:
        check(summary, **given)
    said = str(raised.value)
    assert said.startswith("error: ")
    assert why in said
    assert "\n" not in said
    assert not Path(summary.path).exists()


def test_a_bucket_that_is_there_is_a_destination(bucket: Bucket, summary: SimpleNamespace) -> None:
    bucket.put("models/x", b"x")
    assert check(summary, destination="gs://bucket/models", champion="gs://bucket/none")


def test_a_folder_of_a_champion_is_looked_at_where_the_claims_are_mounted(
    summary: SimpleNamespace, tmp_path: Path, bucket: Bucket
) -> None:
    bucket.put("ds/x", b"x")
    missing = str(tmp_path / "misspelt" / "resnet")
    assert check(summary, champion=missing)
    folders = {"data_dir": str(tmp_path), "work_dir": str(tmp_path)}
    assert check(summary, champion=str(tmp_path / "resnet"), **folders)
    with pytest.raises(SystemExit, match=f"there is no folder {tmp_path}/misspelt: correct"):
        check(summary, champion=missing, **folders)


def test_its_inputs_are_those_of_the_steps_that_it_speaks_for() -> None:
    """Same names, same defaults; the pipeline passes on each of its own that can be wrong."""
    own, trained = preflight.component_spec.inputs, train.component_spec.inputs
    synced = data_sync.component_spec.inputs
    shared = set(own) & set(trained)
    assert len(shared) >= 20
    assert {n: own[n].default for n in shared - {"work_dir"}} == {
        n: trained[n].default for n in shared - {"work_dir"}
    }
    assert own["dataset"].default == synced["dataset"].default
    assert own["sync"].default == synced["options"].default == {}
    unchecked = {"credentials"}
    assert set(train_resnet.pipeline_spec.root.input_definitions.parameters) - set(own) == unchecked
