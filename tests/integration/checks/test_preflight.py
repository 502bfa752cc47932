"""The step preflight: invalid settings fail with one line before the first transfer."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from google.cloud import storage
from PIL import Image

from kfp_ddp.checks import preflight as checks
from kfp_ddp.checks.preflight import check_release
from kfp_ddp.components.preflight.component import preflight
from kfp_ddp.core import packed
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.export.publish import Lineage
from kfp_ddp.k8s.api import Api
from kfp_ddp.models import signature, weights_download
from kfp_ddp.models.bundle import SIGNATURE
from kfp_ddp.models.champion import move
from kfp_ddp.pipelines.train_resnet import train_resnet
from kfp_ddp.plan.form import MODELS, Parameters, description
from kfp_ddp.plan.settings import parse, training_fields, trial_config
from kfp_ddp.plan.sizing import sized
from kfp_ddp.plan.sweep import Sweep
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.training.spec.time_spent import INSTANCE_TYPE
from tests.exports import exported
from tests.gcs_server import Bucket
from tests.registry_server.server import RegistryServer, status

GOOD: dict[str, Any] = {"source": "gs://bucket/ds", "backend": "local"}
INPUTS = {
    name: parameter.default
    for name, parameter in inspect.signature(preflight.python_func).parameters.items()
}
IMAGE = "ghcr.io/kfp-ddp/trainer:0.2.0"
SCRIPT = packed.pack(b"def build(num_classes): ...")


@pytest.fixture
def summary(tmp_path: Path) -> SimpleNamespace:
    return SimpleNamespace(path=str(tmp_path / "summary.md"), metadata={})


def check(summary: SimpleNamespace, **inputs: Any) -> Any:
    return preflight.python_func(plan_summary=summary, **{**GOOD, **inputs})


def test_summary_has_title_and_settings(summary: SimpleNamespace) -> None:
    plan = check(summary, model="resnet18", epochs=12, training={"precision": "bf16"})
    title = summary.metadata["what"]
    assert title.startswith("resnet18 at 224 px, 12 epochs, batch 256, local")
    text = Path(summary.path).read_text()
    assert title in text
    assert '| training.precision | `"bf16"` |' in text
    assert plan.training == {"model": "resnet18", "epochs": 12, "precision": "bf16"}


def test_recipe_auto_fits_images_and_hardware(
    summary: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        path = tmp_path / "images" / "ab"[number % 2] / f"{number}.{'png' if number % 3 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (90, 70)).save(path)
    source = str(tmp_path / "images")
    plan = check(summary, source=source, recipe="auto", epochs=3)
    assert (plan.training["epochs"], plan.training["image_size"]) == (3, 64)
    assert plan.job["nproc_per_node"] >= 1
    assert "40 images in 2 classes" in Path(summary.path).read_text()
    job = {"recipe": "auto", "backend": "pytorchjob", "nodes": 2, "gpus_per_node": 4}
    inputs = {**INPUTS, "source": source, **job, "training": {"label_smoothing": 0.2}}
    run, lines = sized(parse(inputs))
    assert any(line.startswith("estimate: ") and "GPU-hours" in line for line in lines)
    assert any(line.startswith("warning: 36 images") for line in lines)
    for enough in ({"nodes": 1, "gpus_per_node": 1}, {"batch_size": 16}, {"source": "/missing"}):
        assert not any("warning: " in line for line in sized(parse({**inputs, **enough}))[1])
    assert (run.config.image_size, run.config.label_smoothing, run.spec.gpus()) == (64, 0.2, 4)
    assert run.config.batch_size % 8 == 0
    unseen, _ = sized(parse({**inputs, "source": "/missing"}))
    assert unseen.config.image_size == 224
    assert not run.config.starts_from_weights
    monkeypatch.setenv("KFP_DDP_BAKED_WEIGHTS", "resnet50")
    for pretrained, model in (("auto", "resnet50"), ("gs://b/resnet18.pth", "resnet18")):
        tuned, _ = sized(parse({**inputs, "pretrained": pretrained}))
        assert (tuned.config.model, tuned.config.freeze_epochs) == (model, 1)
    assert tuned.config.pretrained == "gs://b/resnet18.pth"
    boxed = {"model": "resnet34", "epochs": 2, "init_from": "false"}
    own, _ = sized(parse({**inputs, "batch_size": 16, "training": boxed}))
    assert (own.config.model, own.config.epochs, own.config.batch_size) == ("resnet34", 2, 16)
    space = {"pretrained": ["true", "false"]}
    swept, _ = sized(parse({**inputs, "sweep": {"space": space}}))
    assert [trial.starts_from_weights for trial in swept.trials] == [True, False]
    rates = {"pretrained": "false", "sweep": {"space": {"optimizer": ["sgd", "adamw"]}}}
    for base in ("sgd", "adamw"):
        swept, _ = sized(parse({**inputs, **rates, "training": {"optimizer": base}}))
        sgd, adamw = swept.trials
        assert (sgd.optimizer, sgd.is_set("learning_rate")) == ("sgd", True)
        assert (adamw.optimizer, adamw.is_set("learning_rate")) == ("adamw", False)
        assert adamw.batch_size == sgd.batch_size
    swept, _ = sized(parse({**inputs, **rates, "training": {"learning_rate": 0.01}}))
    assert [trial.learning_rate for trial in swept.trials] == [0.01, 0.01]
    unknown, _ = sized(parse({**inputs, "pretrained": "gs://b/exports"}))
    assert not unknown.config.is_set("model")  # the ranks read it from the weights


def test_plan_has_the_settings_that_are_set_by_step(summary: SimpleNamespace) -> None:
    plan = check(
        summary,
        sync={"dataset": "flowers", "max_delete": 1, "claim": "mine", "publish": "clone"},
        job={"nproc_per_node": 2.0, "memory": "32Gi", "keep_runs": 7.0, "evaluate_gpus": 1.0},
        gate={"min_slice_accuracy": 0.9, "tags": "tags.csv", "max_latency_ms": 20},
        release={"variants": ["int8"], "calibration_images": 64},
    )
    assert plan.training == {}
    assert plan.sweep == {}
    assert plan.sync == {"max_delete": 1}
    assert plan.gate == {"min_slice_accuracy": 0.9, "max_latency_ms": 20}
    assert plan.measuring == {"tags": "tags.csv"}
    assert plan.release == {"variants": ["int8"], "calibration_images": 64}
    assert (plan.dataset, plan.data_claim, plan.publish) == ("flowers", "mine", "clone")
    job = {"image": IMAGE, "nodes": 1, "nproc_per_node": 2, "memory": "32Gi", "keep_runs": 7.0}
    assert plan.job == job
    # Resources are text, as KFP's driver reads them.
    assert (plan.sync_cpu, plan.sync_memory, plan.evaluate_memory) == ("2", "4Gi", "8Gi")
    assert plan.train_memory == "32Gi", "with backend=local the ranks are in this step"
    assert (plan.evaluate_gpus, plan.gpu_resource) == ("1", "nvidia.com/gpu")


def test_price_is_that_of_the_nodes_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = [{"pool": "a", INSTANCE_TYPE: "p5"}, {"pool": "b", INSTANCE_TYPE: "p4"}]
    nodes = [{"metadata": {"labels": one}} for one in labels]
    monkeypatch.setattr(Api, "connect", lambda **_: None)
    monkeypatch.setattr(checks, "schedulable_nodes", lambda _: nodes)
    prices = {"p5": 12.5, "p4": 3}

    def priced(training: dict[str, Any] = {}, **job: Any) -> Any:  # noqa: B006
        inputs = {**INPUTS, **GOOD, "backend": "pytorchjob", "gpus_per_node": 1, "epochs": 2}
        return checks.with_price(parse({**inputs, "job": job, "training": training}))

    assert priced().config.gpu_hour_price == 0
    assert priced(prices=prices).config.gpu_hour_price == 12.5
    assert priced(prices=prices, node_selector={"pool": "b"}).config.gpu_hour_price == 3
    assert priced({"gpu_hour_price": 7}, prices=prices).config.gpu_hour_price == 7


def test_gpus_are_those_of_nodes_that_the_job_selects(monkeypatch: pytest.MonkeyPatch) -> None:
    def node(capacity: str, driver: str, gpus: str) -> dict[str, Any]:
        names = {"eks.amazonaws.com/capacityType": capacity, "nvidia.com/cuda.driver.major": driver}
        room = {"nvidia.com/gpu": gpus, "cpu": "9", "memory": "9Gi"}
        return {"metadata": {"name": "n", "labels": names}, "status": {"allocatable": room}}

    nodes = [node("ON_DEMAND", "470", "8"), node("SPOT", "580", "2")]
    monkeypatch.setattr(Api, "connect", lambda **_: None)
    monkeypatch.setattr(checks, "schedulable_nodes", lambda _: nodes)
    monkeypatch.setattr(checks, "check_modes", lambda *_: [])
    monkeypatch.setattr("kfp_ddp.jobs.check_job.check", lambda *_: [])
    for job, expected in (({}, (1, 8)), ({"image": "x"}, (0, 8)), ({"spot": "eks"}, (0, 2))):
        run = parse({**INPUTS, **GOOD, "backend": "pytorchjob", "gpus_per_node": -1, "job": job})
        assert (len(checks._check_cluster(run)), run.spec.gpus()) == expected


def test_default_resources_have_no_empty_cpu(summary: SimpleNamespace) -> None:
    """KFP's driver omits an empty number of GPUs; for an empty CPU it fails the run."""
    plan = check(summary)
    assert plan.evaluate_gpus == ""
    assert all((plan.sync_cpu, plan.train_cpu, plan.train_memory, plan.evaluate_memory))
    assert plan.dataset.startswith("ds-"), "derived from the source"


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"source": "ftp://host/ds"}, "it begins with ftp://"),
    ({"sync": {"dataset": "Flowers"}}, "dataset is 'Flowers'"),
    ({"publish": "each-node", "sync": {"publish": "clone"}}, "sync sets publish='clone'"),
    ({"backend": "slurm"}, "backend='slurm' is unknown"),
    ({"job": {"nodes": 2}}, "job sets nodes, which is a parameter of the form"),
    ({"batch_size": 100, "job": {"nproc_per_node": 8}}, "batch_size=100 cannot be divided"),
    ({"recipe": "finetune", "pretrained": "false"}, "finetune needs initial weights"),
    ({"pretrained": "true"}, "cannot be had: KFP_DDP_WEIGHTS is off"),
    ({"script": "train.py"}, "script='train.py'... is not a packed Python file"),
    ({"script": SCRIPT, "model": "train.py:make"}, "train.py does not define make"),
    ({"training": {"sampling": "sqrt"}, "sync": {"pack": "tar"}}, "sync sets pack=tar"),
    ({"gate": {"min_improvement": 0.01}}, "min_improvement is set but champion is empty"),
    ({"gate": {"min_slice_accuracy": 0.9}}, "no tags for slices"),
    ({"gate": {"max_latency_ms": 9}, "checkpoint": "/work/b"}, "gate sets max_latency_ms"),
    ({"destination": "models/resnet"}, "is a folder that does not exist"),
    ({"destination": "gs://absent/x"}, "the bucket gs://absent does not exist"),
    ({"champion": "last"}, "champion=last is the last model at destination, which is empty"),
    ({"champion": "gs://bucket/catdgo"}, "champion=gs://bucket/catdgo is not found"),
    ({"champion": "/work/x", "gate": {"champion_key": "NONE"}}, "champion_key names the key NONE,"),
    ({"champion": "/x", "gate": {"champion_key": "PATH"}}, "champion_key (PATH) is not a public"),
    (
        {"champion": "gs://bucket/models/x/0123456789ab", "destination": "gs://bucket/models"},
        "is not found; this run exports to gs://bucket/models/resnet",
    ),
    ({"checkpoint": "gs://bucket/models/dogs"}, "checkpoint=gs://bucket/models/dogs is not found"),
    ({"recipe": "finetune", "pretrained": "gs://bucket/none.pth"}, "=gs://bucket/none.pth"),
    ({"work": "gs://absent/x"}, "the bucket gs://absent does not exist"),
    ({"job": {"elastic": "1:2"}}, "job has no setting 'elastic'"),
    ({"work": "gs://bucket/x", "job": {"restart_policy": "OnFailure"}}, "job sets restart_policy"),
    ({"work": "file:///runs", "backend": "pytorchjob", "gpus_per_node": 0}, "is not a bucket"),
    ({"sweep": {"space": {"learning_rat": [0.1, 0.2]}}}, "a trial of sweep has no setting"),
]


@pytest.mark.parametrize(("inputs", "reason"), INVALID)
def test_invalid_input_fails_with_one_line_error(
    bucket: Bucket, summary: SimpleNamespace, inputs: dict[str, Any], reason: str
) -> None:
    bucket.put("models/x", b"x")
    with pytest.raises(SystemExit) as raised:
        check(summary, **inputs)
    message = str(raised.value)
    assert message.startswith("error: ")
    assert reason in message
    assert "\n" not in message
    assert not Path(summary.path).exists()


@pytest.mark.parametrize(
    "champion", ["", "last", "gs://bucket/models/resnet", "gs://bucket/models/resnet/"]
)
def test_champion_can_be_missing(bucket: Bucket, summary: SimpleNamespace, champion: str) -> None:
    bucket.put("models/x", b"x")
    plan = check(summary, destination="gs://bucket/models/", champion=champion)
    assert plan.champion == ("gs://bucket/models/resnet" if champion else "")
    assert plan.gate == {}


def test_champion_has_the_signature_of_its_key(
    bucket: Bucket, summary: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = Ed25519PrivateKey.generate()
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    monkeypatch.setenv("PUB", pem.decode())
    where = open_store("gs://bucket/models")
    version = exported(where, "resnet", tmp_path / "bundle", 3, Lineage("r"))
    move(where, "resnet", version, "")
    inputs = {"destination": where.uri, "champion": "last", "gate": {"champion_key": "PUB"}}
    with pytest.raises(SystemExit, match=f"{version} is not signed"):
        check(summary, **inputs)
    signature.sign(tmp_path / "bundle", key)
    where.put(tmp_path / "bundle" / SIGNATURE, f"resnet/{version}/{SIGNATURE}")
    plan = check(summary, **inputs)
    assert plan.gate == plan.measuring == {"champion_key": "PUB"}


def test_champion_folder_is_checked_where_pvcs_are_mounted(
    summary: SimpleNamespace, tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("ds/x", b"x")
    missing = str(tmp_path / "misspelt" / "resnet")
    assert check(summary, champion=missing).gate == {"champion_must_exist": True}
    for variable in ("KFP_DDP_DATA_DIR", "KFP_DDP_WORK_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    assert check(summary, champion=str(tmp_path / "resnet"), destination=str(tmp_path))
    new = str(tmp_path / "new" / "models")
    assert check(summary, champion="last", destination=new).champion == f"{new}/resnet"
    with pytest.raises(SystemExit, match="is not found: correct it, or give last"):
        check(summary, champion=str(tmp_path / "resnet"))
    with pytest.raises(SystemExit, match=f"{tmp_path}/misspelt does not exist: correct"):
        check(summary, champion=missing)


def test_sync_lists_without_pvcs(emulator: storage.Client, summary: SimpleNamespace) -> None:
    plan = check(summary, publish="each-node", work="gs://models/runs", sync={"exclude": ["*.md"]})
    assert plan.publish == "each-node"
    assert plan.sync == {"exclude": ["*.md"], "dry_run": True}
    assert list(emulator.list_blobs("models")) == [], "the test object is deleted"


def test_checkpoint_in_a_bucket_is_evaluated_without_a_training(
    bucket: Bucket, summary: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.put("models/cats/CHAMPION", b"x")
    check(summary, checkpoint="gs://bucket/models/cats", split="test")
    title = "evaluation of gs://bucket/models/cats on test, nothing is trained"
    assert summary.metadata["what"] == title
    assert "warning" not in capsys.readouterr().out


def test_weights_are_a_parameter_or_a_setting(bucket: Bucket, summary: SimpleNamespace) -> None:
    bucket.put("weights.pth", b"x")
    weights = "gs://bucket/weights.pth"
    plan = check(summary, recipe="finetune", pretrained=weights, epochs=3)
    assert (plan.training["pretrained"], plan.training["epochs"]) == (weights, 3)
    assert check(summary, training={"pretrained": weights}).training["pretrained"] == weights
    with pytest.raises(SystemExit, match="training sets pretrained, which is"):
        check(summary, pretrained=weights, training={"pretrained": weights})


def trained(plan: Any, trial: dict[str, Any]) -> dict[str, Any]:
    """Return the training of a trial as the step has it that gets this plan."""
    form = Parameters.create(source="/", recipe=plan.sweep["recipe"], training=plan.training)
    sweep = Sweep.create(**plan.sweep)
    return training_fields(trial_config(sweep, trial, form, {}, weights_download.find))


def test_trial_settings_override_the_training(summary: SimpleNamespace) -> None:
    trials = [{"learning_rate": 0.3, "epochs": 2}, {"momentum": 0.7}]
    given: dict[str, Any] = {"epochs": 9, "training": {"momentum": 0.8}, "run_id": "r"}
    plan = check(summary, recipe="digits", **given, sweep={"trials": trials})
    first, second = (trained(plan, trial) for trial in trials)
    assert (first["learning_rate"], first["epochs"], first["momentum"]) == (0.3, 2, 0.8)
    assert (second["learning_rate"], second["epochs"], second["momentum"]) == (0.2, 9, 0.7)
    assert {trial["model"] for trial in (first, second)} == {"cifar_resnet8"}
    assert not {"data", "output_dir", "run_id"} & {*first, *plan.training}
    plan = check(
        summary,
        training={"early_stop_epochs": 5, "batch_size": 18},  # not in the form of a sweep
        sweep={"space": {"learning_rate": [0.1, 0.2]}},
    )
    trial = trained(plan, {"learning_rate": 0.1})
    assert (trial["early_stop_epochs"], trial["batch_size"]) == (5, 18)


def test_baked_weights_are_taken(summary: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_DDP_BAKED_WEIGHTS", "resnet18")
    trials: Any = {"trials": [{"model": "cifar_resnet8"}, {"learning_rate": 0.1}]}
    for given in ({"recipe": "finetune"}, {"pretrained": "true"}):
        plan = check(summary, model="resnet18", sweep=trials, **given)
        both = [trained(plan, trial) for trial in trials["trials"]]
        assert [trial["pretrained"] for trial in both] == ["false", "true"]
        assert "freeze_epochs" not in both[0]
        assert "in the trainer image" in Path(summary.path).read_text()
    with pytest.raises(SystemExit, match="cannot be had"):
        check(summary, model="resnet18", pretrained="true", job={"image": "mine:1"})
    assert check(summary, model="resnet50", job={"image": "m:1"}).training == {"model": "resnet50"}


def test_script_with_the_network_is_in_the_plan_once(summary: SimpleNamespace) -> None:
    training = check(summary, script=SCRIPT, model="train.py:build").training
    assert (training["script"], training["model"]) == (SCRIPT, "train.py:build")
    assert "model_code" not in training


def test_every_parameter_of_the_form_has_a_field() -> None:
    form = set(train_resnet.pipeline_spec.root.input_definitions.parameters)
    assert form <= {name for model in MODELS for name in model.model_fields}
    assert "as the recipe has it" not in description("pretrained")
    assert description("model").endswith("auto: as the recipe has it.")


@pytest.mark.parametrize(
    ("release", "reason"),
    [
        ({"sign_key": "signing.pem"}, r"sign_key names the key signing\.pem, which the bucket's"),
        ({"sign_key": "sick.pem"}, r"sign_key \(sick\.pem\) is not a private key"),
        ({"registry": "http://x"}, "release names the registry http://x, and no destination"),
        ({"registry": "http://x", "registry_token": "word"}, "registry_token names the key word"),
        ({"registry": "mlflow", "registry_token": "word"}, "registry_token has no effect with reg"),
        ({"registry": "mlflow"}, "registry=mlflow needs MLFLOW_TRACKING_URI"),
        ({"registry": "mlfow"}, "such as http://model-registry-service.*, or the word mlflow"),
    ],
)
def test_bad_release(release: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("sick.pem", "-----BEGIN")
    with pytest.raises(InputError, match=reason):
        check_release(release, None)
    check_release({"variants": ["fp16"]}, None)


def test_registry_that_does_not_answer_fails(registry_server: RegistryServer) -> None:
    check_release({"registry": registry_server.url}, open_store("gs://models"))
    registry_server.fail("*", status(503))
    with pytest.raises(StorageError, match=r"refused .*\(503: injected\)"):
        check_release({"registry": registry_server.url}, open_store("gs://models"))
