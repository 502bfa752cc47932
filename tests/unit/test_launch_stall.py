"""A stalled job: which rank is named, when, and which node the next attempt avoids."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_ddp.jobs.follow.ranks import RankReport, Ranks, Stall, read
from kfp_ddp.jobs.identity import identify
from kfp_ddp.jobs.jobs import AVOIDS, Jobs, avoided
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Object
from tests.cluster import worker

LIMIT = 600.0


def pods(count: int) -> dict[str, Object]:
    created = [worker(index, spec={"nodeName": f"node-{index}"}) for index in range(count)]
    return {item["metadata"]["name"]: item for item in created}


def report(
    rank: int, step: int, phase: str = "step", time: float = 0, per_pod: int = 1
) -> RankReport:
    pod = rank // per_pod
    return RankReport(rank, f"x-worker-{pod}", f"node-{pod}", step, phase, time)


def played(
    *ranks: tuple[int, str, bool], seconds: float = LIMIT, per_pod: int = 1, since: float = 0
) -> Stall | None:
    """Ranks that went to a step and phase at 0 s, and write on or not, for some seconds."""
    count = len(ranks)
    seen = Ranks()
    for clock in range(0, int(seconds) + 1, 10):
        present = [
            report(rank, step, phase, float(clock) if writes else 0.0, per_pod)
            for rank, (step, phase, writes) in enumerate(ranks)
        ]
        seen = seen.look(present, pods(count), clock)
    return seen.stall(pods(count), since, seconds, LIMIT)


ALIVE, SILENT = (7, "step", True), (7, "step", False)


@pytest.mark.parametrize(
    ("ranks", "per_pod", "says", "node"),
    [
        # One that was stopped writes no more.
        ([ALIVE, SILENT], 1, "rank 1 (worker-1 on node node-1) is s", "node-1"),
        # One that lives and is behind, by a step or by the data that it waits for.
        ([ALIVE, (6, "step", True)], 1, "rank 1 (worker-1 on node node-1) is b", "node-1"),
        ([(7, "data", True), ALIVE], 1, "rank 0 (worker-0 on node node-0) is b", "node-0"),
        # All ranks of one pod of two.
        (
            [ALIVE, ALIVE, SILENT, SILENT],
            2,
            "rank 2 (worker-1 on node node-1) and 1 more is silent at step 7 (step)",
            "node-1",
        ),
        # Ranks on several nodes: none of these is at fault alone.
        ([ALIVE, SILENT, SILENT], 1, "rank 1 (worker-1 on node node-1) and 1 more is silent", ""),
        ([ALIVE, ALIVE], 1, "all 2 ranks are at step 7", ""),
        ([SILENT, SILENT], 1, "all 2 ranks are at step 7", ""),
        ([ALIVE], 1, "all 1 ranks are at step 7", ""),
    ],
)
def test_the_rank_that_others_wait_for_is_named(
    ranks: list[tuple[int, str, bool]], per_pod: int, says: str, node: str
) -> None:
    result = played(*ranks, per_pod=per_pod)
    assert result is not None
    assert says in result.failure.error
    assert result.failure.error.startswith("no rank has advanced for 10.0 minutes: ")
    assert result.failure.retryable
    assert result.node == node
    assert played(*ranks, per_pod=per_pod, seconds=LIMIT - 10) is None
    assert played(*ranks, per_pod=per_pod, since=1) is None, "its pods have not run so long"


@pytest.mark.parametrize("phase", ["start", "evaluate", "save"])
def test_a_phase_without_steps_may_take_four_times_as_long(phase: str) -> None:
    ranks = [(7, "step", True), (7, phase, True)]
    assert played(*ranks, seconds=4 * LIMIT - 10) is None
    assert played(*ranks, seconds=4 * LIMIT) is not None
    silent = [(7, phase, True), (7, phase, False)]
    assert played(*silent) is not None, "but a rank that is stopped does nothing"


@settings(max_examples=50, derandomize=True, deadline=None)
@given(
    pauses=st.lists(st.floats(5, LIMIT - 1), min_size=20, max_size=40),
    behind=st.lists(st.integers(0, 1), max_size=3),
)
def test_no_job_in_which_a_rank_advances_is_stalled(pauses: list[float], behind: list[int]) -> None:
    seen, count, at = Ranks(), 1 + len(behind), 0.0
    for step, pause in enumerate(pauses, 1):
        at += pause
        others = [report(rank, step - late, "step", at) for rank, late in enumerate(behind, 1)]
        seen = seen.look([report(0, step, "step", at), *others], pods(count), at)
        assert seen.stall(pods(count), 0, at, LIMIT) is None
        assert seen.stall(pods(count), 0, at + LIMIT, 0) is None
        assert seen.stall(pods(count), 0, at + LIMIT + 1, LIMIT) is not None


def test_reports_of_an_earlier_attempt_are_ignored() -> None:
    left = [report(0, 7)._replace(pod="x-r0-worker-0"), report(1, 7)._replace(pod="x-r0-worker-1")]
    seen = Ranks().look(left, pods(2), 0)
    assert seen.look(left, pods(2), LIMIT).stall(pods(2), 0, LIMIT, LIMIT) is None
    host = [item._replace(time=1.0) for item in left]  # of the node's network: its name
    seen = seen.look(host, pods(2), 10)
    assert seen.stall(pods(2), 0, LIMIT, LIMIT) is None
    result = seen.look(host, pods(2), LIMIT).stall(pods(2), 0, LIMIT + 10, LIMIT)
    assert result is not None
    assert "all 2 ranks are" in result.failure.error


def test_files_that_are_not_reports_are_skipped(tmp_path: Path) -> None:
    good = report(0, 7)._asdict() | {"step_seconds": 0.1}
    (tmp_path / "0.json").write_text(json.dumps(good))
    (tmp_path / "1.json").symlink_to(tmp_path / "0.json")
    (tmp_path / "2.json").mkdir()
    wrong: list[Any] = [None, "1", []]
    bad: list[Any] = [
        *("", "no json", "3", "[]", "null", "[" * 3000),
        *({**good, name: value} for name in ("rank", "step", "time") for value in wrong),
        *({**good, name: "\x1b[2J"} for name in ("pod", "node", "phase")),
        *(
            {key: value for key, value in good.items() if key != name}
            for name in RankReport._fields
        ),
        {**good, "pod": "x" * 5000},
    ]
    for number, text in enumerate(bad, 3):
        line = text if isinstance(text, str) else json.dumps(text)
        (tmp_path / f"{number}.json").write_text(line)
    assert list(read(tmp_path)) == [([report(0, 7)], True)]
    assert list(read(tmp_path / "nowhere")) == [([], True)]


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob"])
def test_the_next_attempts_prefer_other_nodes(kind: str) -> None:
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    needs = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    affinity: dict[str, Any] = {"nodeAffinity": needs, "podAffinity": {}}
    spec = LaunchSpec.create(kind=kind, image="a:1", command=["x"], affinity=affinity)
    api: Any = SimpleNamespace(namespace="space")
    jobs = Jobs(api, spec, identify("run", "train", "", spec), None)
    jobs.__dict__["runtime"] = None
    plain = jobs.manifest(0)
    assert avoided({0: plain}) == frozenset()
    jobs.avoided = frozenset({"b", "a"})
    created = jobs.manifest(1)
    assert created["metadata"]["annotations"] == {AVOIDS: "a,b"}
    assert avoided({0: plain, 1: created}) == {"a", "b"}
    text = json.dumps(created["spec"])
    hosts = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["a", "b"]}
    assert json.dumps(hosts) in text
    assert json.dumps(term) in text
    assert spec.affinity == affinity
