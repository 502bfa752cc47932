"""What can be known before a byte moves is said then, in one line, and handed on as checked."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.cloud import storage

from kfp_ddp.checks.form import MODELS
from kfp_ddp.components.preflight.component import preflight
from kfp_ddp.pipelines.train_resnet import train_resnet
from kfp_ddp.training.recipes import RECIPES
from tests.gcs_server import Bucket

GOOD: dict[str, Any] = {"source": "gs://bucket/ds", "backend": "local", "destination": ""}


@pytest.fixture
def summary(tmp_path: Path) -> SimpleNamespace:
    return SimpleNamespace(path=str(tmp_path / "summary.md"), metadata={})


def check(summary: SimpleNamespace, **given: Any) -> Any:
    return preflight.python_func(plan_summary=summary, **{**GOOD, **given})


def test_good_parameters_are_told_in_one_line(summary: SimpleNamespace) -> None:
    plan = check(summary, model="resnet18", epochs=12, training={"precision": "bf16"})
    said = summary.metadata["what"]
    assert said.startswith("resnet18 at 224 px, 12 epochs, batch 256, local")
    text = Path(summary.path).read_text()
    assert said in text
    assert '| training.precision | `"bf16"` |' in text
    assert plan.training == {"model": "resnet18", "epochs": 12, "precision": "bf16"}


def test_what_is_handed_on_is_what_was_set_and_nothing_else(summary: SimpleNamespace) -> None:
    plan = check(
        summary,
        sync={"dataset": "flowers", "max_delete": 1, "claim": "mine", "publish": "clone"},
        job={"nproc_per_node": 2.0, "memory": "32Gi", "keep_runs": 7.0},
        gate={"min_accuracy": 0.9},
    )
    assert plan.training == {}
    assert plan.sync == {"max_delete": 1}
    assert plan.gate == {"min_accuracy": 0.9}
    assert (plan.dataset, plan.data_claim, plan.publish) == ("flowers", "mine", "clone")
    image = "ghcr.io/kfp-ddp/trainer:0.1.0"
    assert plan.job == {
        "image": image,
        "nodes": 1,
        "nproc_per_node": 2,
        "memory": "32Gi",
        "keep_runs": 7.0,
    }


def test_a_recipe_lies_under_what_is_given(summary: SimpleNamespace) -> None:
    plan = check(summary, recipe="cifar", epochs=3, training={"momentum": 0.8})
    assert plan.training == {**RECIPES["cifar"], "epochs": 3, "momentum": 0.8}


def test_a_name_for_the_dataset_is_made_from_the_source(summary: SimpleNamespace) -> None:
    assert check(summary).dataset.startswith("ds-")


def test_the_last_champion_is_that_of_the_destination(
    bucket: Bucket, summary: SimpleNamespace
) -> None:
    bucket.put("models/x", b"x")
    given = {"destination": "gs://bucket/models/", "model_name": "flowers"}
    assert check(summary, champion="last", **given).champion == "gs://bucket/models/flowers"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"source": "ftp://host/ds"}, "unknown scheme"),
        ({"sync": {"dataset": "Flowers"}}, "dataset is 'Flowers'; give at most 40 lower-case"),
        ({"sync": {"max_delet": 1.0}}, "sync has no setting 'max_delet'; did you mean"),
        ({"sync": {"max_delete": 2.0}}, "max_delete=2.0 cannot be used: it should be less"),
        ({"sync": {"mirror": True}}, "sync sets mirror, which the step sets itself"),
        ({"sync": {"dry_run": True}}, "sync sets dry_run, which syncs nothing"),
        ({"sync": {"publish": "copy"}}, "publish='copy' is unknown: it is one of auto"),
        ({"source": "s3://bucket/ds", "sync": {"publish": "populator"}}, "populator needs gs://"),
        ({"backend": "slurm"}, "backend='slurm' is unknown: it is one of pytorchjob"),
        ({"nodes": 2}, "nodes=2: backend local has one node"),
        ({"job": {"nproc_per_node": -1}}, "nproc_per_node=-1"),
        ({"job": {"nodes": 2}}, "job sets nodes, which is a parameter of the form"),
        ({"job": {"memroy": "2Gi"}}, "job has no setting 'memroy'; did you mean 'memory'?"),
        ({"job": {"command": ["x"]}}, "job sets command, which the step sets itself"),
        ({"job": {"keep_runs": -1}}, "keep_runs=-1 cannot be used"),
        ({"model": "resnet51"}, "did you mean 'resnet50'"),
        ({"epochs": -3}, "epochs=-3 cannot be used"),
        ({"epochs": 3, "training": {"warmup_epochs": 5}}, "leaves nothing of epochs=3"),
        ({"training": {"precison": "bf16"}}, "training has no setting 'precison'; did you mean"),
        ({"training": {"output_dir": "/x"}}, "training sets output_dir, which the step sets"),
        ({"training": {"epochs": 20}}, "training sets epochs, which is a parameter of the form"),
        ({"recipe": "imagenet"}, "recipe='imagenet' is unknown: it is one of none"),
        ({"recipe": "finetune"}, "finetune needs init_from"),
        ({"gate": {"min_accuracy": 70}}, "min_accuracy=70 cannot be used: it should be"),
        ({"gate": {"min_improvement": 0.01}}, "min_improvement is set but champion is empty"),
        ({"gate": {"champion": "x"}}, "gate has no setting 'champion'"),
        ({"model_name": "../model"}, "model_name is '../model'"),
        ({"destination": "https://host/x"}, "cannot store files at https://host/x: give gs://"),
        ({"champion": "hf://datasets/a/b"}, "cannot store files at hf://datasets/a/b: give gs://"),
        ({"destination": "gs://absent/x"}, "the bucket gs://absent does not exist"),
        ({"champion": "gs://absent/x"}, "the bucket gs://absent does not exist"),
        ({"champion": "last"}, "champion=last is the last model at destination, which is empty"),
        (
            {"source": "gs:/bucket/ds"},
            "source='gs:/bucket/ds' is not an address: write gs://bucket/ds",
        ),
        ({"source": "GS//bucket/ds"}, "write gs://bucket/ds"),
        ({"source": "my-bucket/flowers"}, "for a bucket write gs://my-bucket/flowers, for a"),
        ({"source": "gs://My_Bucket/x"}, "'My_Bucket' is not a valid name of a bucket"),
        (
            {"destination": "models/resnet"},
            "destination='models/resnet' is a folder that does not exist",
        ),
        (
            {"champion": "s3:bucket/x"},
            "champion='s3:bucket/x' is not an address: write s3://bucket/x",
        ),
        ({"champion": "gs://bucket/catdgo"}, "champion=gs://bucket/catdgo is not found: correct"),
        (
            {"champion": "gs://bucket/models/x/0123456789ab", "destination": "gs://bucket/models"},
            "is not found; this run exports to gs://bucket/models/resnet: correct it, or give last",
        ),
        (
            {"batch_size": 100, "job": {"nproc_per_node": 8}},
            "batch_size=100 cannot be divided evenly among 8 ranks; use a multiple of 8",
        ),
        ({"work": "gs://absent/x"}, "the bucket gs://absent does not exist"),
        ({"work": "gs:/bucket/x"}, "work='gs:/bucket/x' is not an address: write gs://bucket/x"),
        (
            {"work": "gs://bucket/x", "job": {"elastic": "1:2"}},
            "job sets elastic='1:2', which replaces pods while others run",
        ),
        (
            {"work": "gs://bucket/x", "job": {"restart_policy": "OnFailure"}},
            "job sets restart_policy='OnFailure', which replaces pods",
        ),
        (
            {"work": "file:///runs", "backend": "pytorchjob", "gpus_per_node": 0},
            "work='file:///runs' is not a bucket, which each pod could access: give gs://, s3://",
        ),
        (
            {"publish": "each-node", "sync": {"publish": "clone"}},
            "sync sets publish='clone', but this pipeline mounts no PVC for data: leave it out",
        ),
        (
            {"sync": {"publish": "each-node", "delete": False}},
            "sync sets delete=false, which keeps what a folder had before",
        ),
        ({"job": {"evaluate_cpu": ""}}, "evaluate_cpu='' cannot be used: it should be a quantity"),
        ({"job": {"sync_memory": "4GB"}}, "sync_memory='4GB' cannot be used"),
        ({"job": {"evaluate_gpu": 1}}, "job has no setting 'evaluate_gpu'; did you mean"),
    ],
)
def test_what_would_fail_after_the_training_fails_at_once(
    bucket: Bucket, summary: SimpleNamespace, given: dict[str, Any], why: str
) -> None:
    bucket.put("models/x", b"x")
    with pytest.raises(SystemExit) as raised:
        check(summary, **given)
    said = str(raised.value)
    assert said.startswith("error: ")
    assert why in said
    assert "\n" not in said
    assert not Path(summary.path).exists()


def test_a_bucket_that_is_there_is_a_destination(bucket: Bucket, summary: SimpleNamespace) -> None:
    bucket.put("models/x", b"x")
    assert check(summary, destination="gs://bucket/models").gate == {}


@pytest.mark.parametrize(
    "champion", ["last", "gs://bucket/models/resnet", "gs://bucket/models/resnet/"]
)
def test_a_champion_that_this_run_may_export_first_need_not_be_there(
    bucket: Bucket, summary: SimpleNamespace, champion: str
) -> None:
    bucket.put("models/x", b"x")
    plan = check(summary, destination="gs://bucket/models", champion=champion)
    assert plan.champion == "gs://bucket/models/resnet"
    assert plan.gate == {}


def test_without_claims_the_sync_lists_and_leaves_the_rest_to_who_reads(
    emulator: storage.Client, summary: SimpleNamespace
) -> None:
    plan = check(summary, publish="each-node", work="gs://models/runs", sync={"exclude": ["*.md"]})
    assert plan.publish == "each-node"
    assert plan.sync == {"exclude": ["*.md"], "dry_run": True}
    assert list(emulator.list_blobs("models")) == [], "what was tried with is gone"


def test_what_steps_take_is_text_as_kfp_takes_it(summary: SimpleNamespace) -> None:
    plan = check(summary, job={"memory": "32Gi", "evaluate_gpus": 1.0, "evaluate_cpu": "8"})
    assert plan.job == {"image": "ghcr.io/kfp-ddp/trainer:0.1.0", "nodes": 1, "memory": "32Gi"}
    assert (plan.sync_cpu, plan.sync_memory) == ("2", "4Gi")
    assert plan.train_memory == "32Gi", "the ranks are in this step"
    assert (plan.evaluate_cpu, plan.evaluate_memory) == ("8", "8Gi")
    assert (plan.evaluate_gpus, plan.gpu_resource) == ("1", "nvidia.com/gpu")


def test_no_gpu_is_an_empty_text(summary: SimpleNamespace) -> None:
    """Of what is empty KFP's driver leaves a GPU out; for an empty CPU it fails the run."""
    plan = check(summary)
    assert plan.evaluate_gpus == ""
    assert all((plan.sync_cpu, plan.train_cpu, plan.train_memory, plan.evaluate_memory))


def test_a_folder_of_a_champion_is_looked_at_where_the_claims_are_mounted(
    summary: SimpleNamespace, tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("ds/x", b"x")
    missing = str(tmp_path / "misspelt" / "resnet")
    assert check(summary, champion=missing).gate == {"champion_must_exist": True}
    for variable in ("KFP_DDP_DATA_DIR", "KFP_DDP_WORK_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    assert check(summary, champion=str(tmp_path / "resnet"), destination=str(tmp_path))
    with pytest.raises(SystemExit, match="is not found: correct it, or give last"):
        check(summary, champion=str(tmp_path / "resnet"))
    with pytest.raises(SystemExit, match=f"{tmp_path}/misspelt does not exist: correct"):
        check(summary, champion=missing)


def test_every_box_of_the_form_is_told_in_one_model() -> None:
    form = set(train_resnet.pipeline_spec.root.input_definitions.parameters)
    fields = {name for model in MODELS for name in model.model_fields}
    assert form <= fields
