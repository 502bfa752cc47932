import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kfp_ddp.client.kfp.runs import find_run, newest_runs
from kfp_ddp.client.kfp.steps import Step
from kfp_ddp.client.run import follow, run_info
from kfp_ddp.client.run.run_info import RunFinder
from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import InputError, JobError, RunCancelledError, ServerError
from kfp_ddp.k8s.api import ApiError
from kfp_ddp.k8s.resource import WORKFLOWS
from kfp_ddp.pipelines.document import read
from tests.cluster import FakeApi
from tests.commands import call, document, output, refused
from tests.kfp_server import faults
from tests.kfp_server.server import KfpServer
from tests.run_output import Terminal

pytestmark = pytest.mark.usefixtures("configured")
COMPILED = Path(__file__).parents[3] / "kfp_ddp" / "compiled"
DONE = dict.fromkeys(("preflight", "data-sync", "dataset-volume"), "SUCCEEDED")


@pytest.fixture
def finder(kfp_server: KfpServer) -> Iterator[RunFinder]:
    with RunFinder(Connection(host=kfp_server.url)) as finder:
        yield finder


def _create(server: KfpServer, *names: str) -> list[str]:
    """Create runs of these names, and return their ids."""
    body = {
        "pipeline_spec": read(COMPILED / "train_resnet.yaml").body(),
        "runtime_config": {"parameters": {"source": "gs://bucket/flowers"}},
    }
    runs = [server.store.create_run({"display_name": name, **body}, {}) for name in names]
    return [str(run["run_id"]) for run in runs]


def test_a_run_is_found_by_id_or_name(finder: RunFinder, kfp_server: KfpServer) -> None:
    first, second = _create(kfp_server, "flowers-1", "flowers-2")
    words = {first: first, first[:8]: first, "flowers-1": first, "last": second}
    assert {word: find_run(finder.client, word).run_id for word in words} == words


def test_a_missing_or_ambiguous_run(finder: RunFinder, kfp_server: KfpServer) -> None:
    with pytest.raises(InputError, match="there is no run yet; kfp-ddp run starts one"):
        find_run(finder.client, "last")
    runs = kfp_server.store.runs
    for short, name in (("a1", "twice"), ("a2", "twice"), ("b1", "once")):
        run = runs.pop(*_create(kfp_server, name))
        run_id = f"{short}000000-0000-4000-8000-000000000000"
        runs[run_id] = run | {"run_id": run_id}
    gone = "c1000000-0000-4000-8000-000000000000"
    for word, line in (
        ("a", r"^'a' matches 2 runs: a2000000 of .*, a1000000 of .*; give one's id$"),
        ("twice", r"^'twice' matches 2 runs: "),
        ("onze", r"^there is no run 'onze'; did you mean 'once'\?$"),
        ("c1", r"^there is no run 'c1'; kfp-ddp runs lists them$"),
        (gone, rf"^there is no run {gone}: it was deleted, or is on another server"),
        ("", r"^the name of a run is empty"),
    ):
        with pytest.raises(InputError, match=line):
            find_run(finder.client, word)


def test_all_pages(
    finder: RunFinder, kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = finder.client
    monkeypatch.setattr("kfp_ddp.client.kfp.runs.PAGE", 2)
    ids = _create(kfp_server, *(f"run-{number}" for number in range(5)))
    assert sorted(run.run_id for run in newest_runs(client, 100)) == sorted(ids)
    assert len(list(newest_runs(client, 3))) == 3
    kfp_server.fail("list_runs", faults.endless("runs", [{"run_id": "x", "display_name": "x"}]))
    with pytest.raises(ServerError, match=r"^KFP's list leads back to a page"):
        list(newest_runs(client, 100))


def test_runs_are_listed_by_state_and_experiment(kfp_server: KfpServer) -> None:
    long = "new" * 20  # which is not cut in a pipe
    good, bad, _ = _create(kfp_server, "good", "bad", long)
    kfp_server.store.set_state(good, "SUCCEEDED")
    kfp_server.store.set_state(bad, "FAILED")
    table = output("runs")
    assert [line.split()[2] for line in table.splitlines()[1:]] == [long, "bad", "good"]
    (one,) = document("runs", "--state", "failed")
    assert (one["run_id"], one["state"], one["name"]) == (bad, "FAILED", "bad")
    assert one["parameters"] == {"source": "gs://bucket/flowers"}
    assert len(document("runs", "--experiment", "Default")) == 3
    assert "no experiment 'nightly'" in refused("runs", "--experiment", "nightly")
    assert "it is one of pending, running" in refused("runs", "--state", "lost")


def test_status_shows_the_tree_of_a_run(kfp_server: KfpServer) -> None:
    (run_id,) = _create(kfp_server, "flowers")
    kfp_server.put_run(run_id, "RUNNING", DONE | {"train": "RUNNING"})
    shown = output("status", "flowers")
    assert [line.strip("│├└─ ").split("  ")[0] for line in shown.splitlines()] == [
        "● flowers",
        *("✓ preflight", "● training", "✓ data-sync", "✓ dataset-volume", "● train"),
        *("· evaluate", "· export", "· gate", "· blessed", "· publish", "· service"),
        *("· deploy", "· teardown"),
        f"{kfp_server.url}/#/runs/details/{run_id}",
    ]
    status = document("status", run_id[:8])
    assert status["state"] == "RUNNING"
    train = status["steps"][1]["steps"][2]
    assert (train["name"], train["state"], train["end"]) == ("train", "RUNNING", None)


def test_a_watched_run_that_failed_exits_with_1(kfp_server: KfpServer) -> None:
    (run_id,) = _create(kfp_server, "flowers")
    kfp_server.put_run(run_id, "FAILED", DONE | {"train": "FAILED", "teardown": "SUCCEEDED"})
    watched = call("status", "last", "--follow")
    assert "✗ train           failed" in watched.output
    assert "– evaluate        not run" in watched.output
    assert isinstance(watched.exception, JobError)
    assert f"kfp-ddp describe {run_id[:8]}" in str(watched.exception)


def test_a_run_is_followed_through_faults_of_the_server(
    finder: RunFinder, kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_id,) = _create(kfp_server, "flowers")
    lines: list[str] = []

    def progress(step: Step) -> str:
        return "step 3/9 · loss 0.5" if step.name == "train" and step.start else ""

    def meanwhile() -> Iterator[None]:
        kfp_server.put_run(run_id, "RUNNING", {"preflight": "RUNNING"})
        yield
        kfp_server.fail("get_run", faults.status(503), times=1)
        yield
        kfp_server.put_run(run_id, "RUNNING", DONE | {"train": "RUNNING"})
        yield
        after = dict.fromkeys(("train", "evaluate", "gate", "teardown"), "SUCCEEDED")
        kfp_server.put_run(run_id, "SUCCEEDED", DONE | after | {"condition-2": "SKIPPED"})
        yield

    steps = meanwhile()
    view = follow.lines(lines.append, progress)
    monkeypatch.setattr(follow, "sleep", lambda _: next(steps))
    read, _ = follow.watched(finder, finder.find(run_id))
    run = follow.follow(read, view)
    assert run.state == "SUCCEEDED"
    texts = [line.split(maxsplit=1)[1] for line in lines]
    assert texts[0] == "● preflight       running"
    assert "● train           step 3/9 · loss 0.5" in texts
    assert [line for line in texts if "publish" in line] == ["– publish         not run"]


def test_a_run_is_cancelled_and_retried(kfp_server: KfpServer) -> None:
    (run_id,) = _create(kfp_server, "flowers")
    assert "flowers is PENDING: only a run that failed" in refused("retry", "last")
    cancelled = document("cancel", "flowers")
    assert (cancelled["run_id"], cancelled["state"]) == (run_id, "CANCELING")
    kfp_server.store.set_state(run_id, "FAILED")
    assert "canceled" in output("runs")
    (row,) = document("runs", "--state", "canceled")
    assert (row["state"], row["cancelled"]) == ("CANCELED", True)
    described = document("describe", run_id, "--no-files")
    assert {name: described[name] for name in row} == row
    assert output("describe", run_id, "--no-files").startswith("flowers  CANCELED")
    assert isinstance(call("status", run_id, "--follow").exception, RunCancelledError)
    assert document("runs", "--state", "failed") == []
    assert isinstance((shown := call("status", "flowers")).exception, RunCancelledError)
    assert "CANCELED" in shown.stdout
    assert "flowers is already over (FAILED)" in refused("cancel", "flowers")
    assert len(kfp_server.requests_for("terminate_run")) == 1
    output("retry", run_id[:8])
    assert kfp_server.store.runs[run_id]["state"] == "RUNNING"
    assert call("status", "flowers").exit_code == 0
    kfp_server.store.set_state(run_id, "FAILED")
    for words in ((), ("--json",)):
        failed = call("status", "flowers", *words)
        assert isinstance(failed.exception, JobError)
        assert "FAILED" in failed.stdout


def test_terminal(
    finder: RunFinder, kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_id,) = _create(kfp_server, "flowers")
    terminal = Terminal()

    def end(_: float) -> None:
        kfp_server.put_run(run_id, "SUCCEEDED", DONE | {"train": "SUCCEEDED"})

    kfp_server.put_run(run_id, "RUNNING", DONE | {"train": "RUNNING"})
    monkeypatch.setattr(follow, "sleep", end)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(follow.RunCluster, "progress", lambda *_: "step 3/9 · loss 0.5")
    follow.until_over(finder, finder.find(run_id))
    running, over = terminal.getvalue().split("\x1b[2K", 1)
    assert "step 3/9 · loss 0.5" in running
    assert "SUCCEEDED" in over
    assert "step 3/9" not in over


def test_an_interrupt_or_a_silent_server_ends_the_following_only(
    finder: RunFinder,
    kfp_server: KfpServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (run_id,) = _create(kfp_server, "flowers")

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(follow, "sleep", interrupt)
    with pytest.raises(SystemExit) as ended:
        follow.until_over(finder, finder.find(run_id))
    assert ended.value.code == 130
    assert f"kfp-ddp status {run_id[:8]} --follow" in capsys.readouterr().err
    run = finder.find(run_id)
    kfp_server.fail("get_run", faults.status(401, "expired"), times=1)
    with pytest.raises(ServerError, match=r"expired.*; the run continues"):
        follow.until_over(finder, run)
    with monkeypatch.context() as patch:
        patch.setattr(finder.client, "get_run", Mock(side_effect=InputError("its token is empty")))
        with pytest.raises(ServerError, match="token is empty; the run continues"):
            follow.until_over(finder, run)
    kfp_server.fail("get_run", faults.status(503))
    monkeypatch.setattr(follow, "SILENCE_SECONDS", -1.0)
    with pytest.raises(ServerError, match="503"):
        follow.until_over(finder, run)
    assert not kfp_server.requests_for("terminate_run")


@pytest.mark.parametrize(("user", "reads_as"), [(-1, 1000), (1234, 1234)])
def test_files_on_a_claim_are_read_as_their_user(
    finder: RunFinder,
    kfp_server: KfpServer,
    monkeypatch: pytest.MonkeyPatch,
    user: int,
    reads_as: int,
) -> None:
    (run_id,) = _create(kfp_server, "flowers")
    arguments = {"work_claim": "work", "job": {"run_as_user": user}}
    kfp_server.store.runs[run_id]["runtime_config"]["parameters"] = arguments
    users: list[object] = []

    def open_claim(*given: object) -> Any:
        users.append(given[-1])
        return contextlib.nullcontext(lambda run: None)

    monkeypatch.setattr(run_info, "open_claim", open_claim)
    monkeypatch.setattr(finder, "api", FakeApi)
    finder.find(run_id).files()
    assert users == [reads_as]


@pytest.mark.parametrize(("status", "reads"), [(503, 2), (403, 1)])
def test_the_cluster_is_not_asked_again_only_after_a_refusal(
    finder: RunFinder, monkeypatch: pytest.MonkeyPatch, status: int, reads: int
) -> None:
    workflows = WORKFLOWS.path("space")
    api = FakeApi({workflows: ApiError(status, "", "no")})
    monkeypatch.setattr(finder, "api", lambda: api)
    cluster = follow.RunCluster(finder, "run")
    for _ in range(2):
        cluster._read(lambda api: api.call("GET", workflows), None)
    assert len(api.requests) == reads
