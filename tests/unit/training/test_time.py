"""Time of a rank by phase, the slowest rank, and advice."""

from collections import deque
from typing import Any
from unittest import mock

import pytest
import torch

from kfp_ddp.training.distributed import World
from kfp_ddp.training.report import meter
from kfp_ddp.training.report.meter import GpuTimeline, Timeline, before_exchange, peak_of
from kfp_ddp.training.report.run_report import Report
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.time_spent import (
    INSTANCE_TYPE,
    PHASES,
    Cost,
    Environment,
    Pace,
    TimeSpent,
    advice,
    cost_of,
    price_on,
)


def row(**seconds: float) -> list[float]:
    return [seconds.get(phase, 0.0) for phase in PHASES]


def config(**fields: Any) -> TrainConfig:
    return TrainConfig.create(data="/data", output_dir="/run", **fields)


START: dict[str, Any] = {"event": "start", "time": 1000, "world_size": 4, "device": "H200"}
STEP: dict[str, Any] = {"event": "step", "time": 2800}


@pytest.mark.parametrize(
    ("events", "hours", "unit"),
    [
        ([], 0, "GPU"),
        ([START, STEP], 2, "GPU"),
        ([START | {"device": "CPU", "startup_seconds": 900}, STEP], 3, "rank"),
        ([START, STEP, START | {"time": 9000, "world_size": 2}, STEP | {"time": 9900}], 2.5, "GPU"),
        ([STEP, START | {"world_size": "x"}, STEP | {"time": None}, {}], 0, "GPU"),
    ],
)
def test_cost_of_all_attempts(events: list[dict[str, Any]], hours: float, unit: str) -> None:
    assert cost_of(events, {}) == Cost(hours, None, f"{unit}-hours")
    assert cost_of(events, {"gpu_hour_price": 2.5}).money == 2.5 * hours


@pytest.mark.parametrize(
    ("prices", "price"),
    [({}, 0), ({"p5": 9}, 9), ({"pool=spot": 4.5}, 4.5), ({"p5": 3, "pool=spot": 4.5}, 4.5)],
)
def test_price_is_by_instance_type_or_label(prices: dict[str, float], price: float) -> None:
    nodes = [{"a": "b"}, {INSTANCE_TYPE: "p5", "zone": "p5"}, {"pool": "spot", "p5": "p5"}]
    assert price_on(nodes, prices) == price


def test_each_moment_counts_for_one_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 15.0, 15.5, 16.0])
    monkeypatch.setattr(meter, "perf_counter", lambda: next(clock))
    line = Timeline(began=9.0)  # 10: since 9 it started
    line.enter("data")
    line.enter("forward")
    line.enter("data")
    seconds = line.read()
    assert {name: value for name, value in seconds.items() if value} == {
        "start": 3.0,
        "data": 3.0 + 0.5,
        "forward": 0.5,
    }
    assert sum(seconds.values()) == 16.0 - 9.0


class Event:
    """An event that a GPU completes when `reached` is its time."""

    reached = 0.0
    made = 0
    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        Event.made += 1

    def record(self) -> None:
        Event.now += 1.0
        self.at = Event.now

    def query(self) -> bool:
        return self.at <= Event.reached

    def synchronize(self) -> None:
        Event.reached = max(Event.reached, self.at)

    def elapsed_time(self, other: "Event") -> float:
        assert other.query(), "no step waits for the GPU"
        return (other.at - self.at) * 1e3


def test_events_of_a_gpu_are_read_after_they_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    line = GpuTimeline()
    for step in range(100):
        line.enter("data")
        line.enter("forward")
        Event.reached = max(0.0, Event.now - 6)  # it runs after the processor
        assert Event.made < 16, f"step {step}"
    seconds = line.read()
    assert seconds["forward"] == pytest.approx(100.0)
    assert seconds["data"] == pytest.approx(100.0)


def test_own_gradients_end_before_the_wait_for_other_ranks() -> None:
    order: deque[str] = deque()
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda _: order.append("gradient"))  # type: ignore[no-untyped-call]
    loss = (weight * 2).sum()

    def wait_for_others(grad: torch.Tensor) -> None:
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: order.append("others"))  # as DDP's reducer does

    doubled = loss * 2
    before_exchange(doubled, lambda: order.append("own"))
    loss.register_hook(wait_for_others)  # type: ignore[no-untyped-call]
    torch.autograd.backward(doubled)
    assert list(order) == ["gradient", "own", "others"]


def test_slowest_rank_and_its_slow_phase() -> None:
    even = row(forward=10, backward=20, communication=11)
    late = row(forward=10, backward=21, data=9, communication=1, optimizer=1)
    spent = TimeSpent([even, late, even])
    assert spent.pace.slowest == 1
    assert spent.pace.phase == "data"
    assert spent.pace.straggler == "; rank 1 takes 1.3 times as long as the others, in data"
    assert spent.wait_for_slowest == pytest.approx((11 + 1 + 11) / 3 - 1)
    assert spent.total == pytest.approx(41 + 1 / 3)


@pytest.mark.parametrize(
    ("seconds", "step", "slowest", "ratio", "straggles"),
    [
        ([1.0], 1.0, 0, 1.0, False),
        ([0.0, 0.0], 1.0, 0, 1.0, False),
        ([1.0, 3.0], 3.5, 1, 3.0, True),
        ([1.0, 1.0, 1.0, 1.31], 1.5, 3, 1.31, True),
        ([0.01, 0.03], 1.0, 1, 3.0, False),  # three times of next to nothing
        ([2.0, 1.0, 1.0], 2.0, 0, 2.0, True),
    ],
)
def test_straggler_makes_the_others_wait(
    seconds: list[float], step: float, slowest: int, ratio: float, straggles: bool
) -> None:
    pace = Pace([(0.0, forward, 0.0) for forward in seconds], step)
    assert pace.slowest == slowest
    assert pace.ratio == pytest.approx(ratio)
    named = f"; rank {slowest} takes {ratio:.1f} times as long as the others, in forward"
    assert pace.straggler == (named if straggles else "")


def test_summary_has_the_largest_shares_first() -> None:
    spent = TimeSpent([row(forward=25, backward=60, data=14.9, optimizer=0.1)])
    assert spent.line() == "the time went: 100 s: backward 60 %, forward 25 %, data 15 %"
    two = TimeSpent([row(forward=25, backward=75)] * 2)
    assert two.line() == "the time went: 100 s on 2 ranks: backward 75 %, forward 25 %"


HERE = Environment(ranks=["node-a", "node-b"], cpus=8, decoded=int(7.2e9), room=int(1e12))


@pytest.mark.parametrize(
    ("fields", "here", "expected"),
    [
        ({}, HERE, "workers=4 -> 8, or cache_gb=8"),
        ({"workers": 0}, HERE, "workers=0 -> 2, or cache_gb=8"),
        ({}, HERE._replace(room=int(7e9)), "workers=4 -> 8"),
        ({}, HERE._replace(cpus=6), "workers=4 -> 6, or cache_gb=8"),
        ({"workers": 8}, HERE._replace(decoded=0), "more CPUs than 8 for a rank, images stored"),
    ],
)
def test_advice_on_data_and_cpus(fields: dict[str, Any], here: Environment, expected: str) -> None:
    spent = TimeSpent([row(forward=30, backward=58, data=12)] * 2)
    (line,) = advice(spent, config(**fields), here)
    assert line.startswith(f"12 % of the time waited for data: {expected}")


def test_slow_network_and_slow_rank_differ() -> None:
    network = TimeSpent([row(forward=30, backward=50, communication=20)] * 2)
    (line,) = advice(network, config(), HERE)
    assert line.startswith("20 % of the time waited for the network: a larger batch_size, or")
    fast, slow = row(forward=20, backward=50, communication=30), row(forward=50, backward=50)
    rank = TimeSpent([fast, slow])
    (line,) = advice(rank, config(), HERE)
    assert line.startswith("rank 1 on node-b takes 1.4 times as long as the others, in forward")
    assert "15 % of the time: check its node" in line


def test_short_or_balanced_run_gets_no_advice() -> None:
    short = TimeSpent([row(forward=3, start=7, checkpoint=2, evaluation=8)])
    balanced = TimeSpent([row(forward=30, backward=65, data=2, communication=3)] * 2)
    assert advice(short, config(), HERE) == advice(balanced, config(), HERE) == []


def test_advice_on_checkpoints_evaluations_and_the_start() -> None:
    spent = TimeSpent([row(forward=30, start=70, checkpoint=20, evaluation=80)])
    lines = advice(spent, config(checkpoint_steps=10), HERE._replace(ranks=["a"]))
    parts = [line.partition(": ")[::2] for line in lines]
    assert [(words[:4], remedy) for words, remedy in parts] == [
        ("40 %", "eval_epochs=2 halves it"),
        ("35 %", "verify_images=10000 -> 0, or a longer run"),
        ("10 %", "checkpoint_steps=20 halves it"),
    ]


PEAKS = {
    "NVIDIA A10G": 70,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA H200 NVL": 835,
    "AMD Instinct MI300X": 1307.4,
    "NVIDIA A100 80GB PCIe MIG 1g.10gb": 0,
    "NVIDIA GeForce RTX 4090 Laptop GPU": 0,
}


def test_peak_of_a_gpu() -> None:
    assert {name: peak_of(name) for name in PEAKS} == PEAKS


def test_an_unknown_utilisation_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("kfp_ddp.training.model.networks.build_for", return_value=torch.nn.Flatten(5)):
        assert meter.training_flops(config(), 2) == 0
    gpu = World(0, 1, 0, 1, torch.device("cuda"))
    report = mock.Mock(meter=mock.Mock(device="X1", peak=0, flops=0), world=gpu, steps_total=9)
    Report.begin(report, 0, "", [], 1.0)
    assert "no mfu on X1" in capsys.readouterr().out
