"""Checks of nodes, PVCs and URIs before a run."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_ddp.checks.claims import check_modes, mounted_at_once, single_node_mode
from kfp_ddp.checks.nodes import cpu_warning, gpus_per_node, too_large
from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Api, ApiError
from kfp_ddp.k8s.nodes import gpus
from kfp_ddp.storage.kinds import check_address

NVIDIA, AMD, SLICE = "nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-1g.5gb"
HIDDEN = ApiError(403, "Forbidden", "nodes is forbidden")


def node(**allocatable: Any) -> dict[str, Any]:
    have = {"cpu": "7910m", "memory": "31Gi", "ephemeral-storage": "40018798182", **allocatable}
    return {"metadata": {}, "spec": {}, "status": {"allocatable": have}}


def claim(*modes: str, bound: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"spec": {"accessModes": [*modes]}, "status": {"accessModes": [*bound]}}


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([0, 1, 2, 4, 8]), min_size=1, max_size=12), st.integers(1, 14))
def test_a_pod_requests_the_gpus_that_enough_nodes_have(counts: list[int], pods: int) -> None:
    nodes = [node(**{NVIDIA: str(count)}) if count else node() for count in counts]
    if not any(counts):
        with pytest.raises(InputError, match=r"no node has nvidia\.com/gpu: give gpus_per_node"):
            gpus_per_node(nodes, NVIDIA, pods)
        return
    gpu_nodes = sum(map(bool, counts))
    result = gpus_per_node(nodes, NVIDIA, pods)
    assert result >= 1
    assert sum(count >= result for count in counts) >= (pods if pods <= gpu_nodes else 1)


def test_gpus_by_another_name_are_named() -> None:
    with pytest.raises(InputError) as raised:
        gpus_per_node([node(**{AMD: "8"}), node(**{SLICE: "7"})], NVIDIA, 1)
    assert str(raised.value) == (
        "no node has nvidia.com/gpu, but there is amd.com/gpu, nvidia.com/mig-1g.5gb: "
        'set job={"gpu_resource": "amd.com/gpu"}, or give gpus_per_node, 0 to train on CPUs'
    )


def test_without_a_right_to_look_it_says_what_to_give() -> None:
    with pytest.raises(InputError, match=r"seen \(nodes is forbidden\): give gpus_per_node"):
        gpus_per_node(HIDDEN, NVIDIA, 1)


def test_training_on_cpus_is_said_with_the_gpus_that_it_leaves_idle() -> None:
    on_cpus = "no GPU is requested (gpus_per_node=0): this trains on CPUs"
    assert cpu_warning([node()], NVIDIA) == cpu_warning(HIDDEN, NVIDIA) == on_cpus
    nodes = [node(**{NVIDIA: "8"}), node(**{NVIDIA: "8", AMD: "1"}), node(**{"x.com/npu": "4"})]
    assert cpu_warning(nodes, NVIDIA) == f"{on_cpus}, though nodes have 1 {AMD} and 16 {NVIDIA}"
    assert cpu_warning(nodes, "x.com/npu").endswith(f"1 {AMD} and 16 {NVIDIA} and 4 x.com/npu")


def test_a_count_that_is_no_number_counts_for_none() -> None:
    assert gpus([node(**{NVIDIA: "1k", AMD: "2"})])[AMD] == [2]


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({"cpu": "7", "memory": "30Gi"}, True),
        ({"cpu": "7910m"}, True),
        ({"cpu": "8"}, False),
        ({"memory": "32Gi", "cpu": "1"}, False),
        ({"cpu": "1", NVIDIA: ""}, True),
        ({"cpu": "1", NVIDIA: "2"}, True),
        ({"cpu": "1", NVIDIA: "3"}, False),
        ({"cpu": "1", AMD: "1"}, False),
    ],
)
def test_a_step_that_is_larger_than_every_node_is_told(asked: dict[str, str], fits: bool) -> None:
    """Or it would wait for a node when the training is done."""
    nodes = [node(), node(**{NVIDIA: "2"})]
    found = too_large(nodes, {"evaluate": asked})
    assert len(found) == (not fits)
    assert too_large(HIDDEN, {"evaluate": asked}) == too_large([], {"evaluate": asked}) == []
    assert all(f"{next(iter(asked.values()))} {next(iter(asked))}" in each for each in found)


MODES = ("ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany", "ReadWriteOncePod")


@pytest.mark.parametrize(
    "asked", [m for n in (1, 2, 3) for m in itertools.combinations(MODES[:3], n)]
)
@pytest.mark.parametrize("nodes", [None, 1, 2, 5])
def test_a_claim_for_one_node_holds_up_a_cluster_of_several(
    asked: tuple[str, ...], nodes: int | None
) -> None:
    alone = asked == ("ReadWriteOnce",) and nodes != 1
    assert single_node_mode(claim(*asked), nodes) == ("ReadWriteOnce" if alone else "")


def test_the_modes_of_the_volume_count_too_and_one_pod_is_never_several() -> None:
    assert (
        single_node_mode(claim("ReadWriteOnce", bound=("ReadWriteOnce", "ReadWriteMany")), 2) == ""
    )
    assert single_node_mode(claim("ReadWriteOncePod"), 1) == "ReadWriteOncePod"


@pytest.mark.parametrize(
    ("publish", "with_data"),
    [("in-place", True), ("none", True), ("clone", False), ("snapshot", False), ("auto", False)],
)
def test_a_copy_is_mounted_in_place_of_the_data(publish: str, with_data: bool) -> None:
    volume = {"name": "v", "persistentVolumeClaim": {"claimName": "mine"}}
    spec = LaunchSpec.create(image="a:1", claims={"/x": "own:ro"}, volumes=[volume])
    found = mounted_at_once(spec, "work", "data", publish)
    assert found == sorted({"work", "own", "mine"} | ({"data"} if with_data else set()))


GOOD = [
    *("gs://bucket", "gs://bucket/a/b", "s3://b-1.x_y/p", "https://host/x/_MANIFEST.jsonl", ""),
    *("file:///folder/a", "/folder/gs:/a", "/a", "../a", "./new", "http://10.0.0.1:9000/m"),
]


@pytest.mark.parametrize("value", GOOD)
def test_a_place_that_is_written_as_one_is_let_pass(value: str) -> None:
    check_address("source", value)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.sampled_from(["gs", "s3", "https", "http"]),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.sampled_from(["bucket", "my-bucket/flowers", "a1b/c d/ä", "b.c/x:y"]),
    st.sampled_from([":", ":/", ";//", "//"]),
)
def test_a_mistyped_scheme_is_corrected(
    scheme: str, upper: list[bool], rest: str, separator: str
) -> None:
    pairs = zip(scheme, upper, strict=False)
    typed = "".join(letter.upper() if is_upper else letter for letter, is_upper in pairs)
    with pytest.raises(InputError) as raised:
        check_address("destination", typed + separator + rest)
    assert f"write {scheme}://{rest}" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", ["my-bucket/flowers", "bucket", "gs", "~/images", "a:b/c"])
def test_a_bucket_without_a_scheme_is_no_folder(
    value: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"for a bucket write gs://{value}, for a folder its"):
        check_address("source", value)
    (tmp_path / value).mkdir(parents=True)
    check_address("source", value)


@pytest.mark.parametrize("bucket", ["My_Bucket", "a", "-ab", "ab-", "a b", "x" * 223, "ä-b"])
def test_a_bucket_of_a_name_that_cannot_be_is_refused(bucket: str) -> None:
    with pytest.raises(InputError, match=r"not a valid name .* three or more of small letters"):
        check_address("source", f"gs://{bucket}/x")


@pytest.mark.parametrize("bucket", ["My-Container", "ab", "a--b", "a_b", "-ab", "x" * 64])
def test_a_container_of_a_name_that_cannot_be_is_refused(bucket: str) -> None:
    with pytest.raises(InputError, match="is not a valid name of a bucket"):
        check_address("source", f"az://{bucket}/x")
    check_address("source", "az://a-b-1/x")
    check_address("source", "az://$web/x")


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("gcs://bucket/x", "gs://bucket/x"),
        ("s3a://bucket/x", "s3://bucket/x"),
        ("azure://box/x", "az://box/x"),
        ("abfss://box@acc.dfs.core.windows.net/x/y", "az://box/x/y here, with .*ACCOUNT=acc"),
        ("https://acc.blob.core.windows.net/box/x", "az://box/x here, with .*ACCOUNT=acc"),
        ("az:/box/x", "az://box/x"),
        ("hf:datasets/owner/name", "hf://datasets/owner/name"),
        ("hf://owner/name", "hf://datasets/owner/name"),
    ],
)
def test_a_place_as_other_programs_write_it_is_told_as_it_is_written_here(
    value: str, written: str
) -> None:
    with pytest.raises(InputError, match=written):
        check_address("source", value)
    check_address("source", "https://acc.blob.core.windows.net/box/_MANIFEST.jsonl")
    check_address("source", "hf://datasets/owner/name@v1/folder")


@pytest.mark.parametrize(("nodes", "ends"), [(2, "refused"), (None, "told"), (1, "")])
def test_a_claim_for_one_node_is_refused_where_there_are_several_and_told_where_nobody_knows(
    nodes: int | None, ends: str
) -> None:
    api = Api(None, "space")
    api.call = lambda *_, **__: claim("ReadWriteOnce")  # type: ignore[method-assign]
    if ends == "refused":
        with pytest.raises(
            InputError, match=r"^claim work is ReadWriteOnce.* ReadWriteMany, or sit$"
        ):
            check_modes(api, ["work"], {"work": "sit"}, nodes, 2)
        return
    told = check_modes(api, ["work"], {}, nodes, 2)
    assert [each.partition(",")[0] for each in told] == ["claim work is ReadWriteOnce"] * bool(ends)
