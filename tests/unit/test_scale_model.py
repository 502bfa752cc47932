"""The model of scaling, against cases that can be reckoned by hand or were published."""

import dataclasses
import math

import pytest

from benchmarks.scale_model import failures
from benchmarks.scale_model.collective import (
    MIB,
    Gradient,
    Network,
    all_reduce_seconds,
    buckets_of,
)
from benchmarks.scale_model.expected import JITTER, Feed, Saved, expect, nodes_of_one_claim
from benchmarks.scale_model.kinds import KINDS, Kind
from benchmarks.scale_model.published import DALY, compare
from benchmarks.scale_model.sharing import AllReduce, Loopback, Machine, undisturbed
from benchmarks.scale_model.starting import Start
from benchmarks.scale_model.step import Compute, Transfer, play, slowest_of
from benchmarks.scale_model.syncing import Dataset, Sync

STEP = Compute(before=1, backward=2, after=0.5)
GRADIENTS = [Gradient(10 * MIB, (i + 1) / 10) for i in range(10)]
KIND = Kind("plain", 8, 1000, Network(200, 10, 4, 14), cores=64, mtbf_days=100)
START = Start(imports=3, meeting=0.001, checkpoint=2e8, read=1e9)


def test_a_ring_sends_nearly_twice_its_bytes_and_pays_each_hop() -> None:
    network = Network(inside=100, outside=1, inside_us=0, outside_us=10, base_us=0, tree=False)
    assert all_reduce_seconds(1e9, 1, 1, network) == 0
    assert all_reduce_seconds(1e9, 1, 4, network) == pytest.approx(1.5 / 100)
    # Four nodes: 6 hops between them, at the rate of what joins them.
    assert all_reduce_seconds(1e9, 4, 1, network) == pytest.approx(1.5 + 6 * 10e-6)
    # Fast cards are of no use to ranks that a slow bus joins.
    slow = dataclasses.replace(network, inside=0.5, outside=100, outside_us=0)
    assert all_reduce_seconds(1e9, 2, 2, slow) == pytest.approx(1.5 / 0.5)


def test_a_tree_wins_where_hops_count_and_a_ring_where_bytes_do() -> None:
    network = Network(200, 10, 4, 14)
    ring = dataclasses.replace(network, tree=False)
    assert all_reduce_seconds(1e5, 128, 8, network) < all_reduce_seconds(1e5, 128, 8, ring) / 5
    assert all_reduce_seconds(1e9, 4, 8, network) == all_reduce_seconds(1e9, 4, 8, ring)


def test_gradients_travel_in_a_small_bucket_first_and_in_large_ones_then() -> None:
    sizes = [each.size // MIB for each in buckets_of(GRADIENTS)]
    assert sizes == [10, 30, 30, 30]
    assert [each.ready for each in buckets_of(GRADIENTS)] == [0.1, 0.4, 0.7, 1.0]
    assert [each.size for each in buckets_of(GRADIENTS[:2], cap=100 * MIB)] == [10 * MIB] * 2


@pytest.mark.parametrize(
    ("transfers", "seconds", "exposed"),
    [
        ([], 3.5, 0),
        ([Transfer(0.25, 1.5)], 3.5, 0),  # wholly beside the backward pass
        ([Transfer(1, 0.5)], 4, 0.5),  # the last bucket is always waited for
        ([Transfer(0.5, 3), Transfer(1, 0.5)], 6, 2.5),  # one after another
    ],
)
def test_a_step_waits_for_what_travels_after_its_backward_pass(
    transfers: list[Transfer], seconds: float, exposed: float
) -> None:
    step = play(STEP, transfers)
    assert (step.seconds, step.exposed) == pytest.approx((seconds, exposed))


def test_ranks_take_turns_where_there_are_fewer_cores() -> None:
    assert play(STEP, [], ranks=2, cores=2).seconds == pytest.approx(3.5)
    assert play(STEP, [], ranks=8, cores=2).seconds == pytest.approx(14)
    # From 2 s on each rank asks for two cores and has one: 0.5 s of both take a second.
    beside = play(STEP, [Transfer(0.5, 0.5, cores=1)], ranks=2, cores=2)
    assert (beside.seconds, beside.exposed) == pytest.approx((4, 0))
    # A transfer that needs no core is as long as ever, also where all cores are taken.
    free = play(STEP, [Transfer(1, 0.5)], ranks=8, cores=2)
    assert free.seconds == pytest.approx(14.5)


def test_where_cores_are_short_no_processor_time_is_lost() -> None:
    transfers = [Transfer(0.3, 1.0, cores=0.7), Transfer(1, 0.4, cores=0.7)]
    processor = 4 * (3.5 + 0.7 * 1.4)
    step = play(STEP, transfers, ranks=4, cores=2)
    assert step.seconds == pytest.approx(processor / 2, rel=1e-9)


def test_the_slowest_of_many_is_waited_for() -> None:
    assert slowest_of(1, 0.1) == 1
    assert slowest_of(2, 0.1) == pytest.approx(1.0564, abs=0.003)  # 1 / sqrt(pi) deviations
    assert slowest_of(1000, 0.1) == pytest.approx(1.3241, abs=0.003)  # 3.2414 deviations


def test_this_machine_is_described_by_what_two_ranks_do() -> None:
    small, large = AllReduce(64, 2e-4, 1e-4, 0), AllReduce(64 + 10**7, 1.02e-2, 5.1e-3, 1e-3)
    travels = Loopback.of(small, large)
    assert travels.copied == pytest.approx(1e-10, rel=1e-4)
    assert travels.hop == pytest.approx(1e-4)
    assert travels.byte == pytest.approx(1e-9)
    assert travels.cores == pytest.approx(0.5)
    moved = travels.transfer(Gradient(10**8, 1), ranks=4)
    assert moved.seconds == pytest.approx(6e-4 + 1.5 * 0.1)
    machine = Machine(2, STEP, [Gradient(10**8, 1)], travels, {2: 1.1 * 3.5}, jitter=0)
    assert machine.step_seconds(1) == 3.5
    # Twice the ranks on the same cores: at least twice the work, and the ring sends more.
    assert machine.step_seconds(2) > 1.1 * 3.5
    assert machine.step_seconds(4) > 2 * 1.1 * 3.5
    assert machine.step_seconds(8) > 2 * machine.step_seconds(4)


def test_of_a_machine_measured_several_times_the_least_of_each_constant_counts() -> None:
    travels = Loopback(hop=1e-4, byte=1e-9, cores=0.5, copied=1e-10)
    machine = Machine(2, STEP, [Gradient(10**8, 1)], travels, {2: 4.0}, jitter=0.1)
    slow = dataclasses.replace(machine, alone=STEP.slowed(3), loopback=Loopback(1, 1, 1, 1))
    disturbed = dataclasses.replace(machine, busy={2: 9.0}, jitter=1)
    assert undisturbed([slow, disturbed]) == machine
    assert undisturbed([disturbed, slow]) == machine


def test_the_step_of_ranks_that_take_turns_waits_for_the_slowest_core() -> None:
    travels = Loopback(hop=0, byte=0, cores=0, copied=0)
    machine = Machine(2, STEP, [Gradient(1, 1)], travels, {2: 3.5}, jitter=0.2)
    assert machine.step_seconds(2) == pytest.approx(3.5 * slowest_of(2, 0.2))
    assert machine.step_seconds(8) == pytest.approx(14 * slowest_of(2, 0.1))
    copying = Machine(2, STEP, [Gradient(10**8, 1)], Loopback(0, 0, 0, 1e-8), {2: 3.5}, jitter=0)
    assert copying.step_seconds(2) == pytest.approx(4.5)


@pytest.mark.parametrize(("mtbf", "minutes"), DALY)
def test_the_best_interval_is_the_published_one(mtbf: float, minutes: float) -> None:
    assert failures.best_interval(5, mtbf) == pytest.approx(minutes, rel=0.01)


def test_what_is_kept_is_what_failures_drawn_at_random_leave() -> None:
    for written in (0.0, 500.0):
        given = (600.0, 3.0, written, 120.0, 3 * 3600.0)
        assert failures.kept(*given) == pytest.approx(failures.played(*given), rel=0.01)
    assert failures.kept(600, 3, 20, 120, math.inf) == pytest.approx(600 / 603)


def test_no_other_interval_keeps_more() -> None:
    stall, mtbf = 30.0, 6 * 3600.0
    best = failures.best_interval(stall, mtbf)
    most = failures.kept(best, stall, 0, 300, mtbf)
    assert all(failures.kept(best * by, stall, 0, 300, mtbf) < most for by in (0.7, 0.9, 1.1, 1.4))


def test_a_start_grows_by_the_operators_rate_the_ranks_and_the_claim() -> None:
    assert START.seconds(1, 1) == pytest.approx(2 + 10 + 3 + 0.2)
    # 2,000 requests at 20 a second after the burst of 30; 8,000 ranks; 200 GB from 1 GB/s.
    assert START.seconds(1000, 8) == pytest.approx(15 + 1970 / 20 + 7.999 + 200)


def test_a_sync_takes_what_it_computes_or_what_the_claim_takes() -> None:
    sync, data = Sync(start=1, file=1e-4, byte=1e-9, unchanged=1e-5), Dataset("d", 1e6, 1e11)
    assert sync.first(data, claim=1e10) == pytest.approx(1 + 100 + 100)
    assert sync.first(data, claim=1e8) == pytest.approx(1 + 1000)
    assert sync.again(data) == pytest.approx(11)


def test_one_node_of_one_device_loses_nothing_but_to_failures() -> None:
    alone = dataclasses.replace(KIND, devices=1)
    row = expect(alone, 1, 100, GRADIENTS, Feed(1000), Saved(0.1, 2), START)
    assert (row.step, row.efficiency, row.exposed) == pytest.approx((0.1, 1, 0))
    assert 0.99 < row.goodput < 1


def test_a_step_waits_for_its_images_and_saves_do_not_overtake_each_other() -> None:
    hungry = expect(KIND, 1, 64, GRADIENTS, Feed(10), Saved(0.001, 500), START)
    assert hungry.step == pytest.approx(64 * 8 / 640)
    assert hungry.images_per_s == pytest.approx(640)
    assert hungry.interval == 500
    ideal = dataclasses.replace(KIND, network=Network(1e9, 1e9, 0, 0, 0))
    fed = expect(ideal, 1, 64, GRADIENTS, Feed(1e6), Saved(0.001, 500), START)
    assert fed.efficiency == pytest.approx(1 / slowest_of(8, JITTER))


def test_what_costs_most_is_named() -> None:
    def limit(kind: Kind, nodes: int, feed: Feed) -> str:
        return expect(kind, nodes, 64, GRADIENTS, feed, Saved(0.1, 2), START).limit

    plenty = Feed(1e6)
    slow = dataclasses.replace(KIND, network=Network(200, 0.1, 4, 14))
    assert limit(slow, 8, plenty) == "network"
    assert limit(KIND, 8, Feed(10)) == "input"
    assert limit(dataclasses.replace(KIND, mtbf_days=0.01), 8, plenty) == "failures"
    # A claim of 1 GB/s is no bound to nodes that have copies of their own.
    assert limit(KIND, 64, dataclasses.replace(plenty, local=False)) == "input"
    assert nodes_of_one_claim(KIND, plenty) == pytest.approx(1e9 / 8000 / 108e3)


def test_every_kind_scales_worse_with_more_nodes_and_never_better_than_alone() -> None:
    for kind in KINDS.values():
        rows = [
            expect(kind, nodes, 128, GRADIENTS, Feed(1000), Saved(0.1, 2), START)
            for nodes in (1, 2, 8, 64, 512)
        ]
        shares = [row.goodput for row in rows]
        assert shares == sorted(shares, reverse=True)
        assert 0 < shares[-1] <= shares[0] <= 1


def test_the_model_is_within_a_fifth_of_what_others_published() -> None:
    def evenly(size: float) -> list[Gradient]:
        return [Gradient(int(size / 20), (i + 1) / 20) for i in range(20)]

    # VGG-16's three last layers hold most of its weights, and come first in the backward pass.
    vgg16 = [Gradient(int(4.94e8), 0.03), *evenly(5.9e7)]
    beside = compare({"resnet50": evenly(1.02e8), "resnet101": evenly(1.78e8), "vgg16": vgg16})
    assert len(beside) == 10
    assert max(abs(each.error) for each in beside) < 0.2
    assert sum(abs(each.error) < 0.1 for each in beside) >= 6
