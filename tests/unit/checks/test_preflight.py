"""Checks before a run: the cluster, addresses and settings."""

import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_ddp.checks.claims import check_modes, mounted_at_once, single_node_mode
from kfp_ddp.checks.nodes import check_on_cpus, cpu_warning, gpus_per_node, too_large, unfit
from kfp_ddp.checks.operators import SERVICE_VERBS, check_service
from kfp_ddp.checks.preflight import evaluation, token_of
from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation.engine import job_fields
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import LAUNCHER, STEPS, Api, ApiError, Object
from kfp_ddp.k8s.objects import allocatable
from kfp_ddp.models.release import Registering, part_of
from kfp_ddp.plan.form import StepResources
from kfp_ddp.plan.sweep import MAX_TRIALS, Sweep, examples_of, number_of
from kfp_ddp.rollout.rollout import OURS
from kfp_ddp.storage.address import check_address
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.training.spec.config import TrainConfig
from tests.cluster import FakeApi

NVIDIA, AMD, SLICE = "nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-1g.5gb"
HIDDEN = ApiError(403, "Forbidden", "nodes is forbidden")


def node(**allocatable: Any) -> dict[str, Any]:
    have = {"cpu": "7910m", "memory": "31Gi", "ephemeral-storage": "40018798182", **allocatable}
    return {"metadata": {}, "spec": {}, "status": {"allocatable": have}}


def claim(*modes: str, bound: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"spec": {"accessModes": [*modes]}, "status": {"accessModes": [*bound]}}


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([0, 1, 2, 4, 8]), min_size=1, max_size=12), st.integers(1, 14))
def test_pod_requests_gpus_that_enough_nodes_have(counts: list[int], pods: int) -> None:
    nodes = [node(**{NVIDIA: str(count)}) if count else node() for count in counts]
    if not any(counts):
        with pytest.raises(InputError, match=r"no node has nvidia\.com/gpu: give gpus_per_node"):
            gpus_per_node(nodes, NVIDIA, pods)
        return
    gpu_nodes = sum(map(bool, counts))
    result = gpus_per_node(nodes, NVIDIA, pods)
    assert result >= 1
    assert sum(count >= result for count in counts) >= (pods if pods <= gpu_nodes else 1)


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([node(**{AMD: "8"}), node(**{SLICE: "7"})], f'job={{"gpu_resource": "{AMD}"}}'),
        (HIDDEN, "(nodes is forbidden): give gpus_per_node"),
    ],
)
def test_gpus_that_cannot_be_counted_are_an_error(nodes: Any, reason: str) -> None:
    with pytest.raises(InputError, match=re.escape(reason)):
        gpus_per_node(nodes, NVIDIA, 1)
    assert gpus_per_node([node(**{SLICE: "7"})], SLICE, 1) == 1


def test_training_on_cpus_is_a_warning_with_the_unused_gpus() -> None:
    warning = cpu_warning(HIDDEN, NVIDIA)
    assert "gpus_per_node=0" in warning
    assert cpu_warning([node()], NVIDIA) == warning
    nodes = [node(**{NVIDIA: "8"}), node(**{NVIDIA: "8", AMD: "1"}), node(**{"x.com/npu": "4"})]
    assert cpu_warning(nodes, NVIDIA).endswith(f"nodes have 1 {AMD} and 16 {NVIDIA}")
    for fields in ({"device": "cuda"}, {"decode": "gpu"}):
        with pytest.raises(InputError, match="needs GPUs"):
            check_on_cpus(TrainConfig.create(data="", output_dir="", **fields))
    assert cpu_warning(nodes, "x.com/npu").endswith(f"1 {AMD} and 16 {NVIDIA} and 4 x.com/npu")
    assert allocatable([node(**{NVIDIA: "1k", AMD: "2"})])[AMD] == [2], "1k is not a number of GPUs"


@pytest.mark.parametrize(
    ("request_", "fits"),
    [
        *(({"cpu": "7910m"}, True), ({"memory": "32Gi", "cpu": "1"}, False)),
        *(({"cpu": "1", NVIDIA: "2"}, True), ({"cpu": "1", NVIDIA: "3"}, False)),
        ({"cpu": "1", AMD: "1"}, False),
    ],
)
def test_step_that_fits_on_no_node_is_a_warning(request_: dict[str, str], fits: bool) -> None:
    nodes = [node(), node(**{NVIDIA: "2"})]
    warnings = too_large(nodes, {"evaluate": request_})
    assert len(warnings) == (not fits)
    assert too_large(HIDDEN, {"evaluate": request_}) == too_large([], {"evaluate": request_}) == []
    name, amount = next(iter(request_.items()))
    assert all(f"{amount} {name}" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ({"cuda.driver.major": "535", "gpu.product": "NVIDIA-L4"}, "L4 of node a has driver 535"),
        ({"gpu.compute.major": "7", "gpu.compute.minor": "0"}, "capability 7.0"),
        ({"gpu.compute.major": "7", "gpu.compute.minor": "5", "cuda.driver.major": "580"}, ""),
        ({"cuda.driver-version.major": "550"}, "driver 550"),
        ({"gpu.compute.major": "7", "gpu.compute.minor": "", "cuda.driver.major": "new"}, ""),
    ],
)
def test_gpus_that_cuda_of_the_images_cannot_use(labels: dict[str, str], reason: str) -> None:
    assert "ROCm" in unfit([{**node(**{AMD: "1"}), "metadata": {"name": "b"}}], AMD)[0]
    gpu = node(**{NVIDIA: "1"})
    gpu["metadata"] = {"name": "a", "labels": {f"nvidia.com/{key}": labels[key] for key in labels}}
    assert [reason in line for line in unfit([gpu, gpu, node()], NVIDIA)] == [True] * bool(reason)


MODES = ("ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany", "ReadWriteOncePod")


@pytest.mark.parametrize("nodes", [None, 1, 2, 5])
def test_claim_of_one_node_is_a_problem_on_several(nodes: int | None) -> None:
    for number in (1, 2, 3):
        for modes in itertools.combinations(MODES[:3], number):
            problem = modes == ("ReadWriteOnce",) and nodes != 1
            assert single_node_mode(claim(*modes), nodes) == ("ReadWriteOnce" if problem else "")
    bound = claim("ReadWriteOnce", bound=("ReadWriteOnce", "ReadWriteMany"))
    assert single_node_mode(bound, nodes) == "", "the modes of the volume count too"
    assert single_node_mode(claim("ReadWriteOncePod"), nodes) == "ReadWriteOncePod"


@pytest.mark.parametrize(
    ("publish", "with_data"),
    [("in-place", True), ("none", True), ("clone", False), ("snapshot", False), ("auto", False)],
)
def test_copy_is_mounted_in_place_of_the_data(publish: str, with_data: bool) -> None:
    volume = {"name": "v", "persistentVolumeClaim": {"claimName": "mine"}}
    spec = LaunchSpec.create(image="a:1", claims={"/x": "own:ro"}, volumes=[volume])
    mounted = mounted_at_once(spec, "work", "data", publish)
    assert mounted == sorted({"work", "own", "mine"} | ({"data"} if with_data else set()))


GOOD = [
    *("gs://bucket", "gs://bucket/a/b", "s3://b-1.x_y/p", "https://host/x/_MANIFEST.jsonl", ""),
    *("file:///folder/a", "/folder/gs:/a", "/a", "../a", "./new", "http://10.0.0.1:9000/m"),
    *("az://a-b-1/x", "az://$web/x", "https://acc.blob.core.windows.net/box/_MANIFEST.jsonl"),
    *("hf://datasets/owner/name@v1/folder", "synthetic://10x200@32", "synthetic://4x9@8?seed=7"),
]


@pytest.mark.parametrize("value", GOOD)
def test_valid_address_is_accepted(value: str) -> None:
    check_address("source", value)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.sampled_from(["gs", "s3", "https", "http"]),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.sampled_from(["bucket", "my-bucket/flowers", "a1b/c d/ä", "b.c/x:y"]),
    st.sampled_from([":", ":/", ";//", "//"]),
)
def test_a_scheme_is_corrected(scheme: str, upper: list[bool], rest: str, separator: str) -> None:
    pairs = zip(scheme, upper, strict=False)
    typed = "".join(letter.upper() if is_upper else letter for letter, is_upper in pairs)
    with pytest.raises(InputError, match=re.escape(f"write {scheme}://{rest}")):
        check_address("destination", typed + separator + rest)


@pytest.mark.parametrize("value", ["my-bucket/flowers", "bucket", "gs", "~/images", "a:b/c"])
def test_bucket_without_scheme(value: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"for a bucket write gs://{value}, for a path of"):
        check_address("source", value)
    (tmp_path / value).mkdir(parents=True)
    check_address("source", value)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        *((f"gs://{name}/x", "not a valid name") for name in ("My_Bucket", "a", "-ab", "ab-")),
        *((f"gs://{name}/x", "not a valid name") for name in ("a b", "x" * 223, "ä-b")),
        *((f"az://{name}/x", "not a valid name") for name in ("My-Container", "ab", "a--b")),
        *((f"az://{name}/x", "not a valid name") for name in ("a_b", "-ab", "x" * 64)),
        ("gcs://bucket/x", "gs://bucket/x"),
        ("s3a://bucket/x", "s3://bucket/x"),
        ("abfss://box@acc.dfs.core.windows.net/x/y", "az://box/x/y here, with .*ACCOUNT=acc"),
        ("https://acc.blob.core.windows.net/box/x", "az://box/x here, with .*ACCOUNT=acc"),
        ("hf:datasets/owner/name", "hf://datasets/owner/name"),
        ("hf://owner/name", "hf://datasets/owner/name"),
        *((f"synthetic://{form}", "CLASSESxIMAGES") for form in ("", "4", "4x9@0", "4x9@8&")),
        ("synthetic:/4x9@8", "synthetic://4x9@8"),
    ],
)
def test_invalid_address_is_an_error_that_corrects_it(value: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        check_address("source", value)


@pytest.mark.parametrize(
    "value",
    [
        *(f"{scheme}://me:hunter2@b/x" for scheme in ("gs", "s3", "https", "ftp", "wasbs")),
        *("https:/me:hunter2@h/x.jsonl", "GS:me:hunter2@b", "minio:/me:hunter2@b"),
        *("ftp://me:hun/ter2@b", "abfss://me:hunter2@acc.dfs.core.windows.net/x"),
    ],
)
def test_login_in_an_address_is_not_shown(value: str) -> None:
    release = {"registry": value}
    for read in (
        lambda: check_address("destination", value),
        lambda: open_store(value),
        lambda: part_of(release, Registering),
    ):
        with pytest.raises(InputError) as caught:
            read()
        assert "hun" not in str(caught.value)


@pytest.mark.parametrize(("nodes", "warnings"), [(None, 1), (1, 0)])
def test_claim_of_one_node_is_an_error_or_a_warning(nodes: int | None, warnings: int) -> None:
    api = Api(None, "space")
    api.call = lambda *_, **__: claim("ReadWriteOnce")  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"^claim work is ReadWriteOnce.* ReadWriteMany, or sit$"):
        check_modes(api, ["work"], {"work": "sit"}, 2, 2)
    result = check_modes(api, ["work"], {}, nodes, 2)
    assert [text.partition(",")[0] for text in result] == ["claim work is ReadWriteOnce"] * warnings


def training(**fields: Any) -> LaunchSpec:
    return LaunchSpec.create(image="trainer", command=["true"], **fields)


def test_a_step_that_computes_itself_has_no_token_to_launch() -> None:
    assert {token_of(backend) for backend in ("pytorchjob", "trainjob")} == {LAUNCHER}
    assert token_of("local") not in ("", LAUNCHER), "KFP refuses an empty name of a secret"


def test_step_itself_evaluates_by_default() -> None:
    outputs = evaluation(StepResources.create(evaluate_gpus=2), training(nodes=8))
    assert outputs == {"evaluate_backend": "local", "evaluate_job": {}, "evaluate_gpus": "2"}
    assert evaluation(StepResources.create(), training())["evaluate_gpus"] == ""


def test_evaluation_job_has_its_own_size_and_the_other_settings_of_the_training() -> None:
    steps = StepResources.create(
        evaluate_backend="trainjob", evaluate_nodes=2, evaluate_gpus=4, evaluate_memory="64Gi"
    )
    spec = training(
        nodes=8,
        gpus_per_node=8,
        cpu="90",
        nproc_per_node=8,
        node_selector={"gpu": "h100"},
        retries=3,
    )
    outputs = evaluation(steps, spec)
    assert (outputs["evaluate_backend"], outputs["evaluate_gpus"]) == ("trainjob", "")
    assert outputs["evaluate_job"] == {
        "image": "trainer",
        "node_selector": {"gpu": "h100"},
        "retries": 3,
        "nodes": 2,
        "gpus_per_node": 4,
        "cpu": "4",
        "cpu_request": "250m",
        "memory": "64Gi",
        "memory_request": "1Gi",
    }
    fields = job_fields(outputs["evaluate_job"], "other", "trainjob")
    assert LaunchSpec.create(**fields, command=["true"]).processes() == 4


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"evaluate_nodes": 2}, "evaluate_nodes=2: the step itself is one node"),
        ({"evaluate_backend": "tfjob"}, "evaluate_backend"),
    ],
)
def test_invalid_step_resources_are_one_line(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        StepResources.create(**settings)


@pytest.mark.parametrize(
    ("job", "backend", "reason"),
    [
        ({"nodes": 2}, "local", "nodes=2: backend local has one node"),
        ({"command": ["true"]}, "pytorchjob", "command"),
    ],
)
def test_invalid_evaluation_job_is_one_line(job: dict[str, Any], backend: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        job_fields(job, "trainer", backend)


KSERVE = "/apis/serving.kserve.io/v1beta1"
SHOP = f"{KSERVE}/namespaces/here/inferenceservices/shop"
SERVED = {KSERVE: {"resources": [{"name": "inferenceservices"}]}}
OF_OURS = {"metadata": {"labels": OURS}}


class Cluster(FakeApi):
    """A cluster with these objects by path, whose account has the rights `may`."""

    def __init__(self, objects: dict[str, Object], may: tuple[str, ...] = SERVICE_VERBS) -> None:
        super().__init__({"/readyz": {}, **objects}, "here")
        self.may = may

    def call(self, method: str, path: str, body: Any = None, *_: Any, **named: Any) -> Object:
        if path.endswith("/selfsubjectreviews"):
            return {"status": {"userInfo": {"username": f"system:serviceaccount:here:{STEPS}"}}}
        if method == "POST":
            verb = body["spec"]["resourceAttributes"]["verb"]
            return {"status": {"allowed": verb in self.may}}
        return super().call(method, path, body)


def test_valid_service_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Api, "connect", pytest.fail)
    assert check_service({"canary_requests": 5}, "") == "", "without access to the cluster"
    for existing in ({}, {SHOP: OF_OURS}):
        monkeypatch.setattr(Api, "connect", lambda objects=existing: Cluster({**SERVED, **objects}))
        assert check_service({"service": "shop"}, "gs://models/exports") == "shop"


@pytest.mark.parametrize(
    ("destination", "cluster", "reason"),
    [
        ("", Cluster(SERVED), "names the service shop, and no destination"),
        ("/work/exports", Cluster(SERVED), "KServe cannot read /work/exports/model: give"),
        ("gs://models", Cluster({}), "has no inferenceservices .* install KServe"),
        (
            "gs://models",
            Cluster(SERVED, SERVICE_VERBS[:-1]),
            f"to patch .* as .*{STEPS}; mount",
        ),
        ("gs://models", Cluster({**SERVED, SHOP: {"metadata": {}}}), "was not made by kfp-ddp"),
    ],
)
def test_service_that_cannot_be_used_is_an_error(
    monkeypatch: pytest.MonkeyPatch, destination: str, cluster: Cluster, reason: str
) -> None:
    monkeypatch.setattr(Api, "connect", lambda **_: cluster)
    with pytest.raises(InputError, match=reason):
        check_service({"service": "shop"}, destination)


def test_lists_give_all_combinations_besides_explicit_trials() -> None:
    sweep = Sweep.create(
        space={"learning_rate": [0.1, 0.2], "model": ["resnet18", "resnet34"]},
        trials=[{"epochs": 3}, {"learning_rate": 0.1, "model": "resnet18"}],
    )
    assert examples_of(sweep) == [
        {"epochs": 3},
        {"learning_rate": 0.1, "model": "resnet18"},
        {"learning_rate": 0.1, "model": "resnet34"},
        {"learning_rate": 0.2, "model": "resnet18"},
        {"learning_rate": 0.2, "model": "resnet34"},
    ]


def test_each_value_and_end_of_a_range_is_checked_where_trials_are_drawn() -> None:
    space = {"mixup": {"min": 0, "max": 2}, "optimizer": ["sgd", "adamw"]}
    sweep = Sweep.create(space=space, samples=40)
    assert number_of(sweep) == 40
    mixed = [{"mixup": mixup, "optimizer": "sgd"} for mixup in (0, 2)]
    assert examples_of(sweep) == [*mixed, mixed[0], {"mixup": 0, "optimizer": "adamw"}]


@pytest.mark.parametrize(
    ("sweep", "reason"),
    [
        ({}, "sweep has 0 trials, and 2 to 1000 can be tried"),
        ({"space": {"epochs": [1]}}, "sweep has 1 trials"),
        ({"space": {"epochs": [1, 2, "1"]}}, "epochs has 1 twice"),
        ({"space": {"seed": [*range(MAX_TRIALS + 1)]}}, "1001 combinations, and 1000"),
        ({"samples": 4}, "sweep sets samples, but no space to draw them from"),
        ({"sampler": "tpe", "space": {"epochs": [1, 3]}}, "set samples"),
        ({"reduction_factor": 1}, "ends no trial"),
        ({"space": {"epochs": {"min": 1, "max": 3}}}, "epochs is a range: set samples"),
        ({"space": {"epochs": 3}}, "epochs=3 should be a list of values"),
        ({"samples": 2, "space": {"momentum": {"min": 0.1, "max": 0}}}, "'max': 0} is not a range"),
    ],
)
def test_invalid_sweep_is_an_error(sweep: dict[str, object], reason: str) -> None:
    with pytest.raises(InputError, match=re.escape(reason)):
        examples_of(Sweep.create(**sweep))
