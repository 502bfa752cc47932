"""What a launch leaves for a later one, and which attempt a launch goes on with."""

import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.run_folder import LABEL_VALUE
from kfp_ddp.jobs import jobs as creating
from kfp_ddp.jobs.ending import Ending
from kfp_ddp.jobs.follow.follower import Follower
from kfp_ddp.jobs.follow.printer import LogCursor, Printer, Stamp
from kfp_ddp.jobs.identity import KFP_RUN, Ids, identify, ids_of_step
from kfp_ddp.jobs.jobs import PREEMPTED, REPORTED, Jobs
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.run import Attempts
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.k8s.pods import NODE_NAME
from tests.cluster import MADE, FakeApi, nowhere

MAPS = "/api/v1/namespaces/space/configmaps"
SERVED: dict[str, Object] = {"/apis/kubeflow.org/v1": {"resources": [{"name": "pytorchjobs"}]}}


def jobs_of(store: FakeApi, task: str = "train", task_id: str = "7", **program: Any) -> Jobs:
    spec = LaunchSpec.create(image="a:1", **program or {"command": ["x"]})
    return Jobs(store, spec, identify("run-1", task, task_id, spec), None)


def make(store: FakeApi, script: str) -> Object:
    """The job of a script."""
    return jobs_of(store, "a" * 63, script=script).ensure(0)


def test_an_edited_script_is_not_run_as_it_was_before() -> None:
    """The map of the first one is immutable and stays when its job is deleted to start anew."""
    store = FakeApi()
    make(store, "print('old')")
    with pytest.raises(InputError, match="created with other settings; delete it"):
        make(store, "print('new')")
    for path in [path for path in store.objects if "pytorchjobs" in path]:
        del store.objects[path]
    job = make(store, "print('new')")
    volumes = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["volumes"]
    (name,) = (item["configMap"]["name"] for item in volumes if "configMap" in item)
    kept = store.objects[f"{MAPS}/{name}"]
    assert kept["data"] == {"script.py": "print('new')"}
    assert len(name) <= 63


@pytest.mark.parametrize("script", ["x" * 130_001, "∑" * 50_000])
def test_a_script_too_large_for_a_variable_needs_a_config_map(script: str) -> None:
    make(FakeApi(), script)
    with pytest.raises(InputError, match="no right to create a ConfigMap"):
        make(FakeApi({MAPS: 403}), script)
    job = make(FakeApi({MAPS: 403}), "x" * 129_000)
    assert "volumes" not in str(job) or "configMap" not in str(job)


def test_a_script_too_large_for_a_config_map_is_refused() -> None:
    with pytest.raises(InputError, match=r"have 1,000,001 bytes, and a ConfigMap 1,000,000"):
        make(FakeApi(), "x" * 1_000_001)


LONG = "t" * 40
PAIRS = [(LONG, f"{LONG}-2"), (LONG, f"{LONG}.2"), ("a" * 63, "a" * 62 + "b"), ("a", "a.7")]


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("task_id", ["", "7", "x" * 30])
def test_tasks_of_one_run_have_their_own_jobs(first: str, second: str, task_id: str) -> None:
    store = FakeApi()
    one, other = (jobs_of(store, name, task_id) for name in (first, second))
    one.ensure(0)
    other.ensure(0)
    other.ensure(1)
    assert list(one.attempts()) == [0]
    assert list(other.attempts()) == [0, 1]


def test_a_job_of_another_name_is_not_an_attempt() -> None:
    store = FakeApi()
    jobs = jobs_of(store)
    created = jobs.ensure(0)
    meta = {**created["metadata"], "name": "theirs", "labels": jobs.identity.labels(1)}
    store.objects[jobs.kind.resource.path("space", "theirs")] = {**created, "metadata": meta}
    assert list(jobs.attempts()) == [0]


@pytest.mark.parametrize(
    "change",
    [
        {"data": {"script.py": "print('theirs')"}},
        {"data": {"script.py": "print('ours')", "sitecustomize.py": "print('theirs')"}},
        {"binaryData": {"sitecustomize.pyc": "AAAA"}},
        {"metadata": {"labels": {}}},
    ],
)
def test_a_foreign_config_map_is_refused(change: dict[str, Any]) -> None:
    store = FakeApi()
    make(store, "print('ours')")
    make(store, "print('ours')")  # of its own, it takes up what it made
    (path,) = (item for item in store.objects if "configmaps" in item)
    store.objects[path] |= change
    for job in [item for item in store.objects if "pytorchjobs" in item]:
        del store.objects[job]
    with pytest.raises(InputError, match="exists and is not of this run; it was not changed"):
        make(store, "print('ours')")
    assert list(store.objects) == [path]


def test_cursors_and_lines_are_read_during_changes() -> None:
    """The threads of the logs add to both; the one that saves them may not wait for their lock."""
    printer = Printer()

    class Slow(LogCursor):
        @property
        def restart(self) -> int:
            printer.cursors["another"] = LogCursor(0, Stamp(0, 0), 1)
            return 0

    class Lines(deque[str]):
        def __iter__(self) -> Any:
            printer.recent["another"] = deque()
            return super().__iter__()

    printer.cursors = {"a": Slow(0, Stamp(1, 0), 1), "b": LogCursor(0, Stamp(2, 0), 1)}
    assert printer.dump() == '{"a": [0, 1, 0, 1], "b": [0, 2, 0, 1]}'
    printer.recent = {"a": Lines(["one"]), "b": deque(["two"])}
    assert printer.last_lines() == {"a": ["one"], "b": ["two"]}


def test_two_steps_with_one_folder_keep_cursors_apart(tmp_path: Path) -> None:
    def following(name: str, progress: bool = False) -> Follower:
        job = {"metadata": {"name": name, "uid": name, "creationTimestamp": MADE}}
        ending = Ending(nowhere(), None)
        return Follower(nowhere(), KINDS["pytorchjob"], job, ending, tmp_path, progress)

    for name in ("first", "second"):
        follower = following(name)
        follower.printer.cursors[name] = LogCursor(0, Stamp(1, 0), 1)
        assert follower.files is not None
        follower.files.save_cursors()
        assert follower.progress is None
    assert following("first").printer.cursors.keys() == {"first"}
    assert following("first", progress=True).progress is not None


def job(ended: str = "", *notes: str) -> dict[str, Any]:
    conditions = [{"type": ended, "status": "True"}] if ended else []
    annotations = dict.fromkeys(notes, "true")
    return {"metadata": {"annotations": annotations}, "status": {"conditions": conditions}}


@pytest.mark.parametrize(
    ("jobs", "current", "first", "left"),
    [
        # A running job is adopted.
        ([], 0, 0, 3),
        ([job()], 0, 0, 3),
        ([job("Failed"), job()], 1, 0, 2),
        # A reported failure begins a new series.
        ([job("Failed", REPORTED)], 1, 1, 3),
        ([job("Failed", REPORTED), job()], 1, 1, 3),
        ([job("Failed", REPORTED), job("Failed"), job()], 2, 1, 2),
        # A preempted job is replaced in its series, and uses up no retry.
        ([job("Failed", PREEMPTED)], 1, 0, 3),
        ([job("Failed"), job("Failed", PREEMPTED)], 2, 0, 2),
        ([job("Failed"), job("Failed", PREEMPTED), job("Failed")], 2, 0, 2),
    ],
)
def test_attempt_of_the_next_launch(jobs: list[Any], current: int, first: int, left: int) -> None:
    attempts = Attempts.resume(dict(enumerate(jobs)), KINDS["pytorchjob"])
    assert (attempts.current, attempts.first) == (current, first)
    assert attempts.retries_left(3) == left


def test_a_conflict_without_a_job_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    jobs = jobs_of(FakeApi())
    quota = ApiError(409, "Conflict", "the quota q has been modified")
    jobs.api.objects[jobs.kind.resource.path("space")] = quota  # type: ignore[attr-defined]
    monkeypatch.setattr(creating, "DELETION_SECONDS", 60)
    clock = iter(range(0, 1000, 40))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with pytest.raises(JobError, match="the quota q has been modified"):
        jobs.ensure(0)
    assert pauses == [0.5]


@pytest.mark.parametrize(
    ("served", "answer", "line"),
    [
        ({}, "404 page not found", r"^this cluster has no pytorchjobs .*; install Kubeflow"),
        (SERVED, 'namespaces "space" not found', "^namespace space does not exist; [^;]*$"),
    ],
)
def test_missing_kind_or_namespace(served: dict[str, Object], answer: str, line: str) -> None:
    jobs = jobs_of(FakeApi(served))
    missing = ApiError(404, "Not Found", answer)
    jobs.api.objects[jobs.kind.resource.path("space")] = missing  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=line):
        jobs.ensure(0)


LOOP = 'wf.root.for-loop-1.iteration-iterations(1:{"lr":"0.1"}).iteration-item'


def step_pod(node: str) -> Object:
    return {
        "metadata": {
            "name": "step",
            "labels": {KFP_RUN: "run-1"},
            "annotations": {NODE_NAME: node},
        }
    }


def ids_in(monkeypatch: pytest.MonkeyPatch, found: Any, *given: str) -> Ids:
    monkeypatch.setenv("KFP_POD_NAME", "step")
    store = FakeApi({"/api/v1/namespaces/space/pods/step": found})
    monkeypatch.setattr(Api, "connect", lambda: store)
    return ids_of_step(*given)


@pytest.mark.parametrize(
    ("node", "again", "task"),
    [
        ("wf(0).root(0).job(0).executor(0)", "wf(0).root(0).job(0).executor(1)", "job"),
        ("wf.root.training.job-2.executor", "wf.root.training.job-2.executor(1)", "job-2"),
        (f"{LOOP}.job.executor(0)", f"{LOOP}.job(1).executor(0)", "job"),
    ],
)
def test_ids_that_are_not_given_are_those_of_the_steps_pod(
    monkeypatch: pytest.MonkeyPatch, node: str, again: str, task: str
) -> None:
    """They stay when the step is retried, and no other step or iteration of the run has them."""
    found = ids_in(monkeypatch, step_pod(node), "", "", "")
    assert found[:2] == ("run-1", task)
    assert found == ids_in(monkeypatch, step_pod(again), "", "", "")
    others = (node.replace("job", "other"), node.replace("(1:", "(2:"), f"wf.more.{node}")
    for other in {*others} - {node}:
        assert found != ids_in(monkeypatch, step_pod(other), "", "", "")
    spec = LaunchSpec.create(image="a:1", command=["x"])
    identity = identify(*found, spec)
    assert LABEL_VALUE.fullmatch(identity.task)
    assert identity.name.startswith(f"{task}-")


def test_ids_that_are_given_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = step_pod("wf.root.job.executor(0)")
    assert ids_in(monkeypatch, pod, "a", "b", "") == ("a", "b", "")
    assert ids_in(monkeypatch, pod, "", "b", "") == ("run-1", "b", "wf.root.job.executor")
    assert ids_in(monkeypatch, pod, "a", "", "7") == ("a", "job", "7")


@pytest.mark.parametrize(
    ("status", "error"), [(403, InputError), (404, InputError), (503, ApiError)]
)
def test_a_pod_that_cannot_be_read_gives_no_other_ids(
    monkeypatch: pytest.MonkeyPatch, status: int, error: type[Exception]
) -> None:
    """A retried step would not find its job."""
    with pytest.raises(error):
        ids_in(monkeypatch, status, "", "", "")
