import re
from typing import Any

import pytest
from kfp import dsl

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.step import SECRET
from kfp_ddp.jobs.identity import Owner, identify, metadata
from kfp_ddp.jobs.kinds import pod
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.task import claim_of, read_only, with_claims, with_task_config
from kfp_ddp.k8s.api import LAUNCHER, LAUNCHER_DIR
from tests.launch_specs import SPEC, made


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"script": "print()"}, "give command or script, not both"),
        ({"command": (), "entry": "a.py"}, "entry='a.py' without code: as_folder gives both"),
        ({"command": (), "packages_to_install": ["a==1"]}, "need a command, a script or an entry"),
        ({"kind": "mpijob", "packages_to_install": ["a==1"]}, "runs only in the launcher"),
        ({"pip_index_urls": ["https://e.com"]}, "pip_index_urls without packages_to_install"),
        ({"packages_to_install": ["a==1.*"]}, "it should be a pin such as name==1.0"),
        ({"code": "gs://b/train.tar.gz"}, "code cannot be used: it should be what as_folder"),
        ({"queue": "q"}, "queue='q' without scheduler"),
        ({"image": "a b"}, "image='a b' cannot be used: it should be the name of an image"),
        ({"claims": {"data": "c"}}, "claims.data.[key]='data' cannot be used"),
        ({"claims": {"/data": "a/../b"}}, "it should be the name of a claim, or name:ro"),
        ({"env": {"A B": "c"}}, "it should be the name of a variable"),
        ({"spot": "gek"}, "karpenter, eks; did you mean 'gke'?"),
        ({"rdma_resource": "rdma/hca"}, "rdma_resource='rdma/hca' without nccl_infiniband=on"),
        ({"resources": {"limit": {"cpu": "1"}}}, "it should be 'limits' or 'requests'"),
        ({"resources": {"limits": {"rdma/hca": "one"}}}, "it should be a quantity such as"),
        ({"cpu": "500m", "cpu_request": "1"}, "cpu: 1 are requested, above the limit of 500m"),
        ({"resources": {"limits": {"a/b": "1"}, "requests": {"a/b": "2"}}}, "a/b: 2 are requested"),
        ({"resources": {"limits": {"nvidia.com/gpu": "500m"}}}, "is not a number of GPUs"),
        ({"volume_mounts": [{"name": "a"}]}, "volume_mounts: one has no mountPath"),
        ({"volume_mounts": [{"name": "a", "mountPath": "/a"}]}, "volume_mounts name 'a'"),
        ({"claims": {"/data": "a", "/data/": "b"}}, "/data is mounted twice"),
    ],
)
def test_an_invalid_setting_fails_with_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        LaunchSpec.create(**{**SPEC, **fields})


@pytest.mark.parametrize("spot", [spot for spot in LaunchSpec.choices("spot") if spot])
def test_every_provider_of_spot_nodes_has_a_label_and_a_taint(spot: str) -> None:
    template = pod.template(LaunchSpec.create(**SPEC, spot=spot), {}, "pytorch")["spec"]
    ((key, value),) = template["nodeSelector"].items()
    (toleration,) = template["tolerations"]
    assert (toleration["key"], toleration["value"]) == (key, value)


def test_a_name_is_short_and_the_same_again_and_differs_by_run_task_and_loop() -> None:
    spec = LaunchSpec.create(**SPEC)
    same = identify("run-1", "Train the Model!".replace(" ", "-").strip("!"), "7", spec)
    names = {
        identify(run, task, loop, spec).name
        for run in ("run-1", "run-2")
        for task in ("train", "a" * 99)
        for loop in ("7", "8")
    }
    assert len(names) == 8
    for name in names | {same.name}:
        assert len(f"{name}-r99-worker-4095") <= 63
        assert name[0].isalpha()
        assert name == name.lower()


@pytest.mark.parametrize("bad", ["", "-a", "a b", "x" * 64, "a/b"])
def test_an_id_that_cannot_be_a_label_is_refused(bad: str) -> None:
    with pytest.raises(InputError, match="cannot be a label"):
        identify(bad, "train", "", LaunchSpec.create(**SPEC))


def test_the_job_belongs_to_the_workflow_and_blocks_nothing() -> None:
    spec = LaunchSpec.create(**SPEC, scheduler="kueue", queue="team")
    meta = metadata(spec, identify("r", "t", "", spec), "space", 1, Owner("p", "w", "u"))
    assert meta["name"].endswith("-r1")
    assert meta["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    (owner,) = meta["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("Workflow", "u", False)
    worker = spec.job_kind.manifest(spec, meta, "")["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert "kueue.x-k8s.io/queue-name" not in worker["template"]["metadata"]["labels"]
    assert worker["template"]["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"


def test_single_settings_override_resources() -> None:
    options = {part: {"cpu": "1", "nvidia.com/gpu": "1"} for part in ("limits", "requests")}
    spec = LaunchSpec.create(**SPEC, resources=options, cpu="8", cpu_request="6", gpus_per_node=4)
    assert pod.resources(spec, defaults=False) == {
        "limits": {"cpu": "8", "nvidia.com/gpu": "4"},
        "requests": {"cpu": "6"},
    }


def test_a_dataset_is_mounted_read_only_unless_the_run_writes_beside_it() -> None:
    fields = with_claims({}, ["/data/v1", "/work/run"], {"/data": "images", "/work": "work"})
    assert fields["claims"] == {"/data": "images", "/work": "work"}
    apart = read_only(fields, "/data/v1", "/work/run")
    assert apart["claims"] == {"/data": "images:ro", "/work": "work"}
    assert claim_of(apart, "/data/v1") == "images"
    together = read_only({"claims": {"/all": "one"}}, "/all/data", "/all/run")
    assert together["claims"] == {"/all": "one"}
    volumes = {
        "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "images"}}],
        "volume_mounts": [{"name": "v", "mountPath": "/data"}],
    }
    assert read_only(volumes, "/data/v1", "/work")["volume_mounts"][0]["readOnly"] is True
    assert claim_of(volumes, "/data/v1") == "images"
    assert claim_of(volumes, "/database") == ""


@pytest.mark.parametrize("gpu", ["nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-1g.5gb"])
def test_gpus_set_on_the_task_give_a_process_each_and_an_mpijobs_launcher_none(gpu: str) -> None:
    options = {"limits": {gpu: "8", "cpu": "64"}, "requests": {"cpu": "64"}}
    jobs = {
        kind: made(args=["--x"], kind=kind, nodes=2, resources=options)
        for kind in ("pytorchjob", "trainjob", "mpijob")
    }
    assert jobs["pytorchjob"]["nprocPerNode"] == "8"
    assert jobs["trainjob"]["trainer"]["numProcPerNode"] == 8
    assert jobs["mpijob"]["slotsPerWorker"] == 8
    containers = {
        role: replica["template"]["spec"]["containers"][0]
        for role, replica in jobs["mpijob"]["mpiReplicaSpecs"].items()
    }
    limits = {role: container["resources"]["limits"] for role, container in containers.items()}
    assert containers["Launcher"]["args"] == ["--x"]
    assert "args" not in containers["Worker"]
    assert limits["Worker"][gpu] == "8"
    assert gpu not in limits["Launcher"]
    assert limits["Launcher"]["cpu"] == "1"


def test_settings_of_task_and_component_are_merged() -> None:
    task = dsl.TaskConfig(
        node_selector={"zone": "a", "disk": "ssd"},
        tolerations=[{"key": "gpu"}],
        resources={"limits": {"cpu": "2", "nvidia.com/gpu": "8"}, "requests": {"cpu": "1"}},
        affinity={"nodeAffinity": {"required": 1}, "podAffinity": {"required": 2}},
    )
    parts = {
        "resources": {"limits": {"cpu": "4", "rdma/hca": "1"}},
        "affinity": {"nodeAffinity": {"preferred": 3}},
    }
    assert with_task_config(task, parts)["resources"] == {
        "limits": {"cpu": "4", "nvidia.com/gpu": "8", "rdma/hca": "1"},
        "requests": {"cpu": "1"},
    }
    assert with_task_config(task, parts)["affinity"] == {
        "nodeAffinity": {"required": 1, "preferred": 3},
        "podAffinity": {"required": 2},
    }
    own = {"node_selector": {"zone": "b"}, "tolerations": [{"key": "spot"}], "nodes": 2}
    assert with_task_config(task, own) == {
        "node_selector": {"zone": "b", "disk": "ssd"},
        "tolerations": [{"key": "gpu"}, {"key": "spot"}],
        "resources": task.resources,
        "affinity": task.affinity,
        "nodes": 2,
    }
    assert with_task_config(task, {"node_selector": {}})["node_selector"]["zone"] == "a"


def test_token_of_the_launcher_stays_in_the_step() -> None:
    """KFP passes all volumes of the step; the workers run what may be the code of a stranger."""
    secrets = {"kfp-ddp-bucket": SECRET, LAUNCHER: LAUNCHER_DIR}
    task = dsl.TaskConfig(
        volumes=[{"name": name, "secret": {"secretName": name}} for name in secrets],
        volume_mounts=[{"name": name, "mountPath": path} for name, path in secrets.items()],
    )
    fields = with_task_config(task, {})
    (volume,) = fields["volumes"]
    (mount,) = fields["volume_mounts"]
    assert (volume["name"], mount["mountPath"]) == ("kfp-ddp-bucket", SECRET)
    secret = {"name": "token", "secret": {"secretName": LAUNCHER}}
    assert with_task_config(task, {"volumes": [secret]})["volumes"] == [volume, secret]


def test_non_root_is_asked_of_our_container_and_not_of_an_operators() -> None:
    template = pod.template(LaunchSpec.create(**SPEC), {}, "pytorch")
    assert "runAsNonRoot" not in template["spec"].get("securityContext", {})
    (container,) = template["spec"]["containers"]
    assert container["securityContext"]["runAsNonRoot"] is True


def test_a_claim_with_a_name_that_no_volume_may_have_is_mounted_all_the_same() -> None:
    spec = LaunchSpec.create(**SPEC, claims={"/a": "images.v1:ro", "/b": "x" * 200, "/c": "work"})
    names = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in pod.volumes(spec, "")[:3]}
    assert set(names.values()) == {"images.v1", "x" * 200, "work"}
    assert all(len(name) <= 63 and "." not in name for name in names)
    assert [mount["name"] for mount in pod.mounts(spec, "")[:3]] == list(names)


def test_parts_of_a_gpu_count_and_its_memory_and_cores_do_not() -> None:
    hami = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000", "nvidia.com/gpucores": "30"}
    assert LaunchSpec.create(**SPEC, resources={"limits": hami}).processes() == 1
    for name in ("nvidia.com/gpu.shared", "nvidia.com/mig-1g.5gb", "amd.com/gpu"):
        assert LaunchSpec.create(**SPEC, resources={"limits": {name: "2"}}).processes() == 2


@pytest.mark.parametrize("scheduler", ["volcano", "coscheduling"])
def test_a_gang_is_all_pods(scheduler: str) -> None:
    """An MPIJob has one pod more than nodes; what is left out, the operator makes all pods."""
    for kind in ("pytorchjob", "tfjob", "mpijob", "xgboostjob"):
        policy = made(kind=kind, nodes=2, scheduler=scheduler)["runPolicy"]["schedulingPolicy"]
        assert "minAvailable" not in policy


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob"])
def test_the_step_enforces_a_deadline_before_the_operator(kind: str) -> None:
    def seconds(**fields: Any) -> Any:
        job = made(kind=kind, **fields)
        return job.get("runPolicy", job).get("activeDeadlineSeconds")

    assert seconds(deadline_minutes=1.5) == 150
    assert seconds() is None


def test_the_timeout_of_collectives_is_a_variable() -> None:
    """Torch takes it from no variable, so nothing of torch's is set to something else."""
    spec = LaunchSpec.create(**SPEC, nccl_timeout_minutes=2.5)
    result = {item["name"]: item.get("value") for item in pod.environment(spec, "", "torchrun")}
    assert result["KFP_DDP_TIMEOUT_SECONDS"] == "150"
    assert not [name for name in result if name.startswith("TORCH_NCCL")]


def test_a_repeated_pull_secret_is_used_once() -> None:
    """The API server refuses a list with the same name twice."""
    spec = LaunchSpec.create(
        kind="pytorchjob", image="a:1", command=["x"], image_pull_secrets=["a", "b", "a"]
    )
    assert spec.image_pull_secrets == ("a", "b")
