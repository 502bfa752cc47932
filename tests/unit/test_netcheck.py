"""What a network's figures mean: who is named, and for what."""

import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.jobs import netcheck
from kfp_ddp.jobs.follow.follower import Outcome
from kfp_ddp.jobs.follow.logs import LONGEST, unprinted
from kfp_ddp.jobs.kinds.base import State
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import split_lines
from kfp_ddp.training.netcheck.rank import rounds, transports
from kfp_ddp.training.netcheck.record import Network, NetworkCheck, Node, Size, need, problems
from tests.cluster import FakeApi
from tests.commands import call, refused

ASKED = NetworkCheck()


def network(rates: list[list[float]], **changed: Any) -> Network:
    nodes = [
        Node(
            name=f"node-{number}", host=f"node-{number}", address="10.0.0.1", interface="eth0",
            mtu=1500, link_mbit_s=10_000, infiniband=[], dns_ms=1.0,
        )
        for number in range(len(rates))
    ]  # fmt: skip
    sizes = [
        Size(bytes=4096, ms=1.0, bus_gbit_s=0.1),
        Size(bytes=64_000_000, ms=101.0, bus_gbit_s=9.0),
    ]
    defaults = {"ranks": len(rates), "backend": "gloo", "nodes": nodes, "latency_us": 90.0}
    return Network(**{**defaults, "sizes": sizes, "rates": rates, **changed})


def even(count: int, rate: float = 9.0) -> list[list[float]]:
    return [[0.0 if a == b else rate for b in range(count)] for a in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 33])
def test_rounds_pair_each_node_once_with_each_other(count: int) -> None:
    met = list(rounds(count))
    for pairs in met:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
    pairs = [(min(pair), max(pair)) for group in met for pair in group]
    assert sorted(pairs) == list(itertools.combinations(range(count), 2))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_even_network_has_no_problem(count: int) -> None:
    assert problems(network(even(count)), ASKED) == []


@pytest.mark.parametrize("count", [3, 4, 9])
@pytest.mark.parametrize("way", ["sends", "receives"])
def test_slow_node_is_the_only_problem(count: int, way: str) -> None:
    rates = even(count)
    for other in range(count):
        if other != 1 and way == "sends":
            rates[1][other] = 2.0
        elif other != 1:
            rates[other][1] = 2.0
    (line,) = problems(network(rates), ASKED)
    assert line.startswith(f"node-1 {way} 2.00 Gbit/s, where the others have 9.00")


def test_slow_link_is_named() -> None:
    (line,) = problems(network([[0, 9.0], [0.5, 0]]), ASKED)
    assert line.startswith("node-1 sends 0.50 Gbit/s and receives 9.00")
    assert problems(network([[0, 9.0], [5.0, 0]]), ASKED) == []
    rates = even(4)
    rates[0][3] = 2.0
    (line,) = problems(network(rates), ASKED)
    assert line.startswith("node-0 to node-3 gives 2.00 Gbit/s, where both have 9.00 with others")
    rates[2][0] = 7.0
    lines = problems(network(rates), NetworkCheck(min_gbit_s=8))
    slowest_first = ["node-0 to node-3", "node-2 to node-0"]
    assert [line.partition(" gives ")[0] for line in lines][-2:] == slowest_first


def test_mtu_and_name_resolution_are_checked() -> None:
    result = network(even(2))
    first, second = result.nodes
    nodes = [first, second.model_copy(update={"mtu": 9000, "dns_ms": 2000.0})]
    mtu, dns = problems(result.model_copy(update={"nodes": nodes}), ASKED)
    assert mtu.endswith("node-0 1500, node-1 9000")
    assert dns.startswith("node-1 takes 2000 ms")


def test_cost_of_a_step() -> None:
    result = network(even(2))
    check = NetworkCheck(gradient_mb=64)
    assert need(result, check).startswith("averaging 64 MB of gradients takes 101 ms; it is hidden")
    # Of 90 ms of computing 60 are the backward pass: 41 ms of 131 are waited for.
    exposed = need(result, check.model_copy(update={"step_ms": 90.0}))
    assert exposed.endswith("31% of the time of a step of 90 ms waits for it")
    hidden = need(result, check.model_copy(update={"step_ms": 300.0}))
    assert hidden.endswith("hidden by the backward pass of a step of 300 ms")
    assert result.gradients_ms(32.002048) == pytest.approx(51.0)
    assert result.gradients_ms(640) == pytest.approx(1010.0)
    assert need(network(even(1), ranks=1), ASKED) == ""


def test_transports_in_the_log_of_nccl() -> None:
    log = (
        "host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
        "host:1:2 [0] NCCL INFO Channel 01/0 : 1[1] -> 0[0] [receive] via NET/IB/0\n"
    )
    assert transports(log) == ["NET/IB/0", "P2P/CUMEM"]


@pytest.mark.slow
def test_ranks_of_this_machine_measure() -> None:
    words = ["netcheck", "--backend", "local", "--nodes", "2", "--largest-mb", "1", "--json"]
    program = [sys.executable, "-m", "kfp_ddp", *words]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    result = Network.model_validate_json(done.stdout)
    assert (result.ranks, result.backend, len(result.nodes)) == (2, "gloo", 1)
    assert [size.bytes for size in result.sizes] == [4096, 32768, 262144, 1_000_000]
    assert all(size.ms > 0 and size.bus_gbit_s > 0 for size in result.sizes)
    assert result.latency_us > 0
    assert result.nodes[0].interface == "lo"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--job", "nodes=3"), "--job sets nodes, which is an option of its own"),
        (("--largest-mb", "0"), "largest_mb"),
        (("--backend", "local", "--job", "bogus=1"), "bogus"),
    ],
)
def test_invalid_settings_are_one_line(words: tuple[str, ...], says: str) -> None:
    assert says in refused("netcheck", *words)


def test_nodes_zero_is_refused() -> None:
    assert call("netcheck", "--nodes", 0).exit_code == 2


def test_a_large_result_arrives_in_lines_that_are_not_split() -> None:
    result = network(even(200))
    stamp = "2026-11-25T10:00:00.123456789Z"
    lines = [f"{stamp} {line}\n".encode() for line in result.lines()]
    raw = [piece.decode().rstrip("\n") for piece in split_lines(lines, LONGEST)]
    assert len(raw) == len(lines) > 1
    texts = ["nccl: ready", *(text for _, text in unprinted(raw, 0, None))]
    assert netcheck._read(texts) == result
    with pytest.raises(JobError, match="ended without a result"):
        netcheck._read(texts[:-1])


@pytest.mark.parametrize(("job", "pods"), [({"nodes": 3}, 3), ({"elastic": "2:4"}, 2)])
def test_network_of_a_job_is_measured_each_time(
    job: dict[str, Any], pods: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[LaunchSpec] = []

    def launch(spec: LaunchSpec, *_: Any) -> Outcome:
        created.append(spec)
        lines = {"uid": [*network(even(spec.nodes)).lines()]}
        return Outcome(State("succeeded"), job={"metadata": {"name": "x"}}, last_lines=lines)

    monkeypatch.setattr(netcheck, "launch", launch)
    api = FakeApi()
    netcheck.require(1.0, {"image": "a", **job}, ("run", "train", ""), api)
    (spec,) = created
    assert (spec.nodes, spec.pods()) == (pods, pods)
    job_path = spec.job_kind.resource.path("space", "x")
    assert api.deleted() == [job_path]  # else a retry would adopt it
    with pytest.raises(JobError, match="less than the minimum of 10"):
        netcheck.require(10.0, {"image": "a", **job}, ("run", "train", ""), api)


def test_component_measures_with_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(netcheck, "here", lambda check, ranks: network(even(1), ranks=ranks))
    run: Any = netcheck.run
    artifact = SimpleNamespace(path=str(tmp_path / "out"), metadata={}, log_metric=lambda *_: None)
    ids = {"run_id": "r", "task_name": "t", "task_id": ""}
    fields = {**ids, "backend": "local", "nodes": 2, "gpus_per_node": 0, "check": {}, "image": "a"}
    more = {"network_summary": artifact, "network_metrics": artifact}
    assert run(**fields, **more, job={"nproc_per_node": 2})
    with pytest.raises(InputError, match="nproc_per_nodes"):
        run.__wrapped__(**fields, **more, job={"nproc_per_nodes": 2})
