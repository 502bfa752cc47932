"""`kfp-ddp schedule replace` and `delete` end no run."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kfp_ddp.client import scheduling
from kfp_ddp.core.errors import RefusedError, ServerError
from tests.commands import call, document, output, refused
from tests.kfp_server import faults
from tests.kfp_server.server import KfpServer
from tests.schedules import COMPILED, create, new_version, stored, uploaded

pytestmark = pytest.mark.usefixtures("configured")


@pytest.fixture(autouse=True)
def own(kfp_server: KfpServer) -> str:
    return uploaded(kfp_server)


def test_replace_changes_the_given_settings(kfp_server: KfpServer, own: str) -> None:
    old = create("nightly", "--set", "rate=0.5", "--experiment", "flowers")
    newest = new_version(kfp_server, own, "own-2")
    was = dict(kfp_server.store.recurring_runs[old["id"]])
    output("schedule", "replace", "nightly", "--cron", "30 4 * * 1", "--set", "rounds=5")
    (new,) = kfp_server.store.recurring_runs.values()
    assert new["recurring_run_id"] != old["id"]
    assert new["trigger"] == {"cron_schedule": {"cron": "0 30 4 * * 1"}}
    assert new["runtime_config"]["parameters"] == {"rounds": 5, "rate": 0.5}
    same = ("display_name", "experiment_id", "pipeline_version_reference", "status", "no_catchup")
    assert [new[name] for name in same] == [was[name] for name in same]

    words = ("--pinned", "--unset", "rate", "--max-concurrency", "2", "--catchup")
    output("schedule", "replace", "nightly", *words)
    (newer,) = kfp_server.store.recurring_runs.values()
    assert newer["pipeline_version_reference"]["pipeline_version_id"] == newest
    assert newer["trigger"] == new["trigger"]
    assert newer["runtime_config"]["parameters"] == {"rounds": 5}
    assert (newer["max_concurrency"], newer.get("no_catchup", False)) == ("2", False)

    output("schedule", "replace", "nightly", "--latest")
    (newest_of_all,) = kfp_server.store.recurring_runs.values()
    assert newest_of_all["pipeline_version_reference"] == {"pipeline_id": own}


def test_replace_ends_no_run_and_cleans_up(kfp_server: KfpServer) -> None:
    old = create()
    run = kfp_server.store.trigger(old["id"])
    done = call("schedule", "replace", "nightly", "--cron", "0 5 * * *")
    assert f"({old['id'][:8]}) is paused and remains until its run is over" in done.stderr
    assert stored(kfp_server) == [
        ("nightly", "0 0 3 * * *", "DISABLED"),
        ("nightly", "0 0 5 * * *", "ENABLED"),
    ]
    shown = document("schedule", "show", "nightly")
    assert shown["cron"] == "0 0 5 * * *"
    kfp_server.store.set_state(run["run_id"], "SUCCEEDED")
    # KFP tells seconds: of one and the same, either may be the later.
    kfp_server.store.recurring_runs[old["id"]]["created_at"] = "2020-01-01T00:00:00Z"
    begin = len(kfp_server.requests)
    output("schedule", "replace", "nightly", "--cron", "0 6 * * *")
    assert stored(kfp_server) == [("nightly", "0 0 6 * * *", "ENABLED")]
    changes = [one for one in kfp_server.requests[begin:] if one.method != "GET"]
    names = ["create", "disable", "enable", "delete", "delete"]  # both are never enabled
    assert [one.operation for one in changes] == [f"{name}_recurring_run" for name in names]
    assert changes[0].body["mode"] == "DISABLE"


@pytest.mark.parametrize("step", ["create_recurring_run", "disable_recurring_run"])
def test_a_failed_replace_is_undone(kfp_server: KfpServer, step: str) -> None:
    create()
    kfp_server.fail(step, faults.status(403, "no right"), 1)
    done = call("schedule", "replace", "nightly", "--cron", "0 5 * * *")
    assert isinstance(done.exception, RefusedError)
    assert stored(kfp_server) == [("nightly", "0 0 3 * * *", "ENABLED")]


def test_resume_completes_a_failed_replace(kfp_server: KfpServer) -> None:
    create()
    kfp_server.fail("enable_recurring_run", faults.status(500), 1)
    done = call("schedule", "replace", "nightly", "--cron", "0 5 * * *")
    assert isinstance(done.exception, ServerError)
    new = list(kfp_server.store.recurring_runs)[-1]
    assert f"kfp-ddp schedule resume {new}" in str(done.exception)
    message = refused("schedule", "replace", "nightly", "--cron", "0 6 * * *")
    assert "names 2 paused schedules" in message
    output("schedule", "resume", new)
    assert [status for _, _, status in stored(kfp_server)] == ["DISABLED", "ENABLED"]


def test_a_paused_one_stays_paused_and_a_misread_one_needs_a_cron(kfp_server: KfpServer) -> None:
    created = create("nightly", "--paused")
    output("schedule", "replace", "nightly", "--set", "rounds=4")
    assert stored(kfp_server) == [("nightly", "0 0 3 * * *", "DISABLED")]
    assert created["id"] not in kfp_server.store.recurring_runs
    (schedule,) = kfp_server.store.recurring_runs.values()
    schedule["trigger"]["cron_schedule"]["cron"] = "0 3 * * *"
    assert "give --cron" in refused("schedule", "replace", "nightly", "--set", "rounds=4")
    message = refused("schedule", "replace", "nightly", "--cron", "0 3 * * *", "--unset", "rat")
    assert "--unset rat: the schedule does not set it" in message
    output("schedule", "replace", "nightly", "--cron", "0 3 * * *")
    assert stored(kfp_server) == [("nightly", "0 0 3 * * *", "DISABLED")]


def test_only_force_ends_a_run(kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    created = create()
    run = kfp_server.store.trigger(created["id"])
    message = refused("schedule", "delete", "nightly")
    assert f"run {run['run_id'][:8]} of nightly is active, and KFP would end it" in message
    assert stored(kfp_server) == [("nightly", "0 0 3 * * *", "ENABLED")]
    assert "exclude each other" in refused("schedule", "delete", "nightly", "--wait", "--force")

    def while_it_waits(_: float) -> None:
        assert stored(kfp_server)[0][2] == "DISABLED"
        kfp_server.store.set_state(run["run_id"], "FAILED")

    monkeypatch.setattr(scheduling, "sleep", while_it_waits)
    output("schedule", "delete", "nightly", "--wait")
    assert stored(kfp_server) == []

    created = create()
    kfp_server.store.trigger(created["id"])
    deleted = document("schedule", "delete", "nightly", "--force")
    assert deleted == {"deleted": created["id"], "name": "nightly"}
    assert stored(kfp_server) == []


def test_replace_keeps_the_settings_inside_a_mapping(kfp_server: KfpServer) -> None:
    kfp_server.store.upload_pipeline(COMPILED.read_bytes(), {"name": "train-resnet"})
    words = ("--pipeline", "train-resnet", "--cron", "0 3 * * *", "--set", "seed=7")
    output("schedule", "create", "nightly", *words, "--set", "source=gs://photos/flowers")
    output("schedule", "replace", "nightly", "--set", "warmup_epochs=1.0")
    (schedule,) = kfp_server.store.recurring_runs.values()
    given = schedule["runtime_config"]["parameters"]
    assert given["training"] == {"seed": 7, "warmup_epochs": 1.0}


def test_delete_ends_no_later_run(kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    created = create()
    disable = kfp_server.store.disable_recurring_run

    def disable_late(query: dict[str, str], recurring_run_id: str) -> dict[str, Any]:
        kfp_server.store.trigger(recurring_run_id)
        return disable(query, recurring_run_id)

    monkeypatch.setattr(kfp_server.store, "disable_recurring_run", disable_late)
    assert "is active, and KFP would end it" in refused("schedule", "delete", created["id"])
    assert stored(kfp_server) == [("nightly", "0 0 3 * * *", "ENABLED")]


def test_replace_drops_a_start_in_the_past(kfp_server: KfpServer) -> None:
    create("nightly", "--start", "2020-01-01", "--catchup")
    output("schedule", "replace", "nightly", "--set", "rounds=4")
    (schedule,) = kfp_server.store.recurring_runs.values()
    assert schedule["trigger"] == {"cron_schedule": {"cron": "0 0 3 * * *"}}
    assert schedule.get("no_catchup", False) is False


def test_no_time_after_the_end_is_listed(kfp_server: KfpServer) -> None:
    end = datetime.now(UTC) + timedelta(hours=47)
    created = create("nightly", "--end", end.isoformat())
    assert 1 <= len(created["next"]) <= 2
    cron = kfp_server.store.recurring_runs[created["id"]]["trigger"]["cron_schedule"]
    cron["end_time"] = "2020-01-01T00:00:00Z"
    assert "is ended" in call("schedule", "show", "nightly").output
    message = refused("schedule", "replace", "nightly", "--set", "rounds=4")
    assert "end=2020-01-01T00:00:00+00:00 is in the past" in message


def test_replace_keeps_the_account(kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--service-account", "trainer", "--pipeline-root", "gs://a/root")
    create("nightly", *words, "--end", "2099-01-01")
    monkeypatch.setenv("KFP_DDP_SERVICE_ACCOUNT", "another")
    monkeypatch.setenv("KFP_DDP_PIPELINE_ROOT", "gs://b/mine")
    output("schedule", "replace", "nightly", "--end", "never")
    (one,) = kfp_server.store.recurring_runs.values()
    assert one["trigger"] == {"cron_schedule": {"cron": "0 0 3 * * *"}}
    assert (one["service_account"], one["runtime_config"]["pipeline_root"]) == (words[1], words[3])
    output("schedule", "replace", "nightly", "--service-account", "new")
    (one,) = kfp_server.store.recurring_runs.values()
    assert one["service_account"] == "new"
