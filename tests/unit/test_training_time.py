"""Where a rank's time goes, who is slow at what, and what is said of it."""

from collections import deque
from typing import Any

import pytest
import torch

from kfp_ddp.training import meter
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.meter import GpuTimeline, Timeline, on_own_gradients
from kfp_ddp.training.time_spent import PHASES, Environment, TimeSpent, advice


def row(**seconds: float) -> list[float]:
    return [seconds.get(phase, 0.0) for phase in PHASES]


def config(**fields: Any) -> TrainConfig:
    return TrainConfig.create(data="/data", output_dir="/run", **fields)


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
    """An event of a GPU that gets to it when `reached` says so."""

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
        assert other.query(), "nobody may wait for the GPU in a step"
        return (other.at - self.at) * 1e3


def test_the_times_of_a_gpu_are_read_when_it_got_there_by_few_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_the_end_of_own_gradients_is_told_before_anything_that_waits_for_others() -> None:
    heard: deque[str] = deque()
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda _: heard.append("gradient"))  # type: ignore[no-untyped-call]
    loss = (weight * 2).sum()

    def wait_for_others(grad: torch.Tensor) -> None:
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: heard.append("others"))  # as DDP's reducer does

    doubled = loss * 2
    on_own_gradients(doubled, lambda: heard.append("own"))
    loss.register_hook(wait_for_others)  # type: ignore[no-untyped-call]
    torch.autograd.backward(doubled)
    assert list(heard) == ["gradient", "own", "others"]


def test_the_slow_rank_and_what_it_is_slow_at_are_told() -> None:
    even = row(forward=10, backward=20, communication=11)
    late = row(forward=10, backward=21, data=9, communication=1, optimizer=1)
    spent = TimeSpent([even, late, even])
    assert spent.pace.slowest == 1
    assert spent.pace.phase == "data"
    assert spent.pace.straggler == "; rank 1 takes 1.3 times as long as the others, in data"
    assert spent.for_the_slowest == pytest.approx((11 + 1 + 11) / 3 - 1)
    assert spent.total == pytest.approx(41 + 1 / 3)


def test_the_line_tells_the_largest_shares_first_and_leaves_out_what_is_nothing() -> None:
    spent = TimeSpent([row(forward=25, backward=60, data=14.9, optimizer=0.1)])
    assert spent.line() == "the time went: 100 s: backward 60 %, forward 25 %, data 15 %"
    two = TimeSpent([row(forward=25, backward=75)] * 2)
    assert two.line() == "the time went: 100 s on 2 ranks: backward 75 %, forward 25 %"


HERE = Environment(ranks=["node-a", "node-b"], cpus=8, decoded=int(7.2e9), room=int(1e12))


@pytest.mark.parametrize(
    ("fields", "here", "said"),
    [
        ({}, HERE, "workers=4 -> 8, or cache_gb=8"),
        ({"workers": 0}, HERE, "workers=0 -> 2, or cache_gb=8"),
        ({}, HERE._replace(decoded=0), "workers=4 -> 8"),
        ({}, HERE._replace(room=int(7e9)), "workers=4 -> 8"),
        ({}, HERE._replace(cpus=6), "workers=4 -> 6, or cache_gb=8"),
        ({"workers": 8}, HERE, "cache_gb=8"),
        (
            {"workers": 8},
            HERE._replace(decoded=0),
            "more CPUs than 8 for a rank, or images stored at image_size=224",
        ),
    ],
)
def test_what_helps_against_waiting_for_data_depends_on_what_is_there(
    fields: dict[str, Any], here: Environment, said: str
) -> None:
    spent = TimeSpent([row(forward=30, backward=58, data=12)] * 2)
    assert advice(spent, config(**fields), here) == [f"12 % of the time waited for data: {said}"]


def test_a_run_that_waits_for_nothing_is_told_nothing() -> None:
    spent = TimeSpent([row(forward=30, backward=65, data=2, communication=3)] * 2)
    assert advice(spent, config(), HERE) == []


def test_a_slow_network_is_told_from_a_slow_rank() -> None:
    network = TimeSpent([row(forward=30, backward=50, communication=20)] * 2)
    assert advice(network, config(), HERE) == [
        "20 % of the time waited for the network: a larger batch_size, or a faster network "
        "(kfp-ddp netcheck measures it)"
    ]
    fast, slow = row(forward=20, backward=50, communication=30), row(forward=50, backward=50)
    rank = TimeSpent([fast, slow])
    assert advice(rank, config(), HERE) == [
        "rank 1 on node-b takes 1.4 times as long as the others, in forward, and they wait for it "
        "15 % of the time: check its node (temperature, another tenant), or trace it "
        "(kfp-ddp trace --rank 1)"
    ]


def test_a_run_of_seconds_is_told_nothing_of_what_it_does_once() -> None:
    spent = TimeSpent([row(forward=3, start=7, checkpoint=2, evaluation=8)])
    assert advice(spent, config(), HERE) == []


def test_checkpoints_evaluations_and_the_start_are_told_where_they_take_much() -> None:
    spent = TimeSpent([row(forward=30, start=70, checkpoint=20, evaluation=80)])
    said = advice(spent, config(checkpoint_steps=10), HERE._replace(ranks=["a"]))
    assert said == [
        "40 % of the time evaluated: eval_epochs=1 -> 2",
        "35 % of the time was the start, before the first step: verify_images=10000 -> 0, or a "
        "longer run",
        "10 % of the time saved checkpoints: checkpoint_steps=10 -> 20",
    ]
