"""Schedules as people make, change and end them, on a KFP server of the published contract."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

from kfp_ddp.base.errors import InputError, RefusedError, ServerError
from kfp_ddp.client import scheduling
from tests.kfp_server import faults
from tests.kfp_server.server import KfpServer

COMPILED = Path(__file__).parents[2] / "kfp_ddp" / "compiled" / "train_resnet.yaml"
OWN: dict[str, Any] = {
    "pipelineInfo": {"name": "own"},
    "schemaVersion": "2.1.0",
    "root": {
        "dag": {"tasks": {"only": {"componentRef": {"name": "comp-only"}}}},
        "inputDefinitions": {
            "parameters": {
                "rounds": {"parameterType": "NUMBER_INTEGER"},
                "rate": {"parameterType": "NUMBER_DOUBLE", "defaultValue": 0.1},
            }
        },
    },
    "components": {"comp-only": {"executorLabel": "exec-only"}},
    "deploymentSpec": {"executors": {"exec-only": {"container": {"image": "busybox"}}}},
}
Call = Callable[..., Result]


@pytest.fixture
def own(kfp_server: KfpServer) -> str:
    """The id of a small pipeline that the server has, whose one version is called own."""
    data = yaml.safe_dump(OWN).encode()
    return str(kfp_server.store.upload_pipeline(data, {"name": "own"})["pipeline_id"])


def new_version(server: KfpServer, pipeline_id: str, name: str) -> str:
    data = yaml.safe_dump(OWN).encode()
    made = server.store.upload_pipeline_version(data, {"pipelineid": pipeline_id, "name": name})
    made["created_at"] = "2099-01-01T00:00:00Z"
    return str(made["pipeline_version_id"])


def create(call: Call, name: str = "nightly", *more: str) -> dict[str, Any]:
    """A schedule, as the server has it."""
    words = ("--pipeline", "own", "--cron", "0 3 * * *", "--set", "rounds=3", *more, "--json")
    done = call("schedule", "create", name, *words)
    assert done.exception is None, done.output
    return dict(json.loads(done.stdout))


def refused(call: Call, *words: str) -> str:
    """The one line that a command ends with."""
    done = call("schedule", *words)
    assert isinstance(done.exception, InputError), done.output
    assert "\n" not in str(done.exception)
    return str(done.exception)


def kept(server: KfpServer) -> list[tuple[str, str, str]]:
    """The schedules of the server, oldest first: name, cron, status."""
    return [
        (one["display_name"], one["trigger"]["cron_schedule"]["cron"], one["status"])
        for one in server.store.recurring_runs.values()
    ]


def test_five_fields_arrive_as_six_and_all_is_said_in_words(
    call: Call, kfp_server: KfpServer, own: str
) -> None:
    words = ("--pipeline", "own", "--cron", "0 3 * * *", "--set", "rounds=3")
    done = call("schedule", "create", "nightly", *words)
    assert done.exception is None, done.output
    (schedule,) = kfp_server.store.recurring_runs.values()
    assert schedule["trigger"] == {"cron_schedule": {"cron": "0 0 3 * * *"}}
    assert schedule["runtime_config"] == {"parameters": {"rounds": 3}}
    assert (schedule["no_catchup"], schedule["max_concurrency"]) == (True, "1")
    version = schedule["pipeline_version_reference"]["pipeline_version_id"]
    assert kfp_server.store.versions[version]["name"] == "own"
    day = datetime.now(UTC) + timedelta(days=datetime.now(UTC).hour >= 3)
    for said in (
        "is enabled",
        "At 03:00, every day (0 0 3 * * *)",
        f"next          {day:%Y-%m-%d} 03:00, ",
        "UTC, that of the server (CRON_SCHEDULE_TIMEZONE)",
        "own@own",
        "1 run; one that is due meanwhile waits",
        "a run for the last time alone that was missed",
        "rounds=3",
    ):
        assert said in done.output


def test_the_options_arrive(call: Call, kfp_server: KfpServer, own: str) -> None:
    told = create(
        call,
        "weekly",
        *("--latest", "--paused", "--catchup", "--max-concurrency", "2"),
        *("--start", "2098-01-01", "--end", "2099-01-01T00:00:00Z"),
        *("--time-zone", "Europe/Vienna", "--experiment", "flowers"),
        *("--pipeline-root", "s3://artifacts", "--service-account", "trainer"),
    )
    (schedule,) = kfp_server.store.recurring_runs.values()
    assert schedule["pipeline_version_reference"] == {"pipeline_id": own}
    assert schedule["trigger"]["cron_schedule"] == {
        "cron": "0 0 3 * * *",
        "start_time": "2098-01-01T00:00:00+01:00",
        "end_time": "2099-01-01T00:00:00+00:00",
    }
    assert (schedule["status"], schedule.get("no_catchup", False)) == ("DISABLED", False)
    assert (schedule["max_concurrency"], schedule["service_account"]) == ("2", "trainer")
    assert schedule["runtime_config"]["pipeline_root"] == "s3://artifacts"
    experiment = kfp_server.store.experiments[schedule["experiment_id"]]
    assert experiment["display_name"] == "flowers"
    assert told["next"][0] == "2098-01-01T03:00:00+01:00"
    assert told["pipeline"] == "own, always the newest version"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cron", "0 3 * *"), "has 4 fields"),
        (("--cron", "TZ=Europe/Vienna 0 3 * * *"), "names a time zone, which KFP refuses"),
        (("--cron", "0 3 31 2 *"), "never comes"),
        (("--time-zone", "Mars/Base"), "there is no time zone 'Mars/Base'"),
        (("--end", "2020-01-01"), "end=2020-01-01T00:00:00+00:00 is in the past"),
        (("--start", "2020-01-01"), "is in the past: leave it out, or give --catchup"),
        (("--start", "2098-01-02", "--end", "2098-01-01"), "does not come before end="),
        (("--start", "tomorrow"), "start='tomorrow' is no time"),
        (("--set", "rounds=1.5"), "rounds=1.5 cannot be used: it should be a whole number"),
        (("--set", "round=1"), "there is no setting 'round'; did you mean 'rounds'?"),
        (("--pipeline", "owm"), "the server has no pipeline 'owm'"),
        (("--pipeline", "own@2"), "has no version '2'"),
        (("--pipeline", "own@own", "--latest"), "do not go together"),
        (("--pipeline", ""), "--pipeline is missing"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_and_nothing_is_made(
    call: Call, kfp_server: KfpServer, own: str, words: tuple[str, ...], said: str
) -> None:
    given = ("--pipeline", "own", "--cron", "0 3 * * *", "--set", "rounds=3")
    assert said in refused(call, "create", "nightly", *given, *words)
    assert not kfp_server.store.recurring_runs
    assert len(kfp_server.store.experiments) == 1


def test_our_pipelines_are_checked_as_a_run_of_them_is(call: Call, kfp_server: KfpServer) -> None:
    kfp_server.store.upload_pipeline(COMPILED.read_bytes(), {"name": "train-resnet"})
    words = ("--pipeline", "train-resnet", "--cron", "0 3 * * *")
    assert "source is missing" in refused(call, "create", "nightly", *words)
    source = ("--set", "source=gs://photos/flowers")
    said = refused(call, "create", "nightly", *words, *source, "--set", "nodes=1.5")
    assert "nodes=1.5 cannot be used" in said
    assert not kfp_server.store.recurring_runs
    done = call(
        "schedule", "create", "nightly", *words, *source, "--destination", "gs://photos/models"
    )
    assert done.exception is None, done.output
    (schedule,) = kfp_server.store.recurring_runs.values()
    given = schedule["runtime_config"]["parameters"]
    assert given == {"source": "gs://photos/flowers", "destination": "gs://photos/models"}


def test_two_of_one_name_are_refused(call: Call, kfp_server: KfpServer, own: str) -> None:
    create(call)
    words = ("--pipeline", "own", "--cron", "0 4 * * *", "--set", "rounds=4")
    assert "there is a schedule 'nightly'" in refused(call, "create", "nightly", *words)
    assert kept(kfp_server) == [("nightly", "0 0 3 * * *", "ENABLED")]


def test_list_and_show_find_by_name_and_id_and_warn_of_five_fields(
    call: Call, kfp_server: KfpServer, own: str
) -> None:
    assert call("schedule", "list").stderr == "no schedules\n"
    first = create(call)
    for number in range(101):  # more than a page
        kfp_server.store.create_recurring_run(
            {
                "display_name": f"made-in-the-ui-{number}",
                "pipeline_version_reference": {"pipeline_id": own},
                "runtime_config": {"parameters": {"rounds": 1}},
                "trigger": {"cron_schedule": {"cron": "*/5 * * * *"}},
            },
            {},
        )
    run = kfp_server.store.trigger(first["id"])
    told = json.loads(call("schedule", "list", "--json").stdout)
    assert len(told) == 102
    other = next(one for one in told if one["name"] == "made-in-the-ui-7")
    assert other["when"] == "Every 5 seconds, every minute, every hour, every day"
    assert "of which KFP reads the first as seconds" in other["warning"]
    shown = call("schedule", "list")
    assert "At 03:00, every day" in shown.stdout
    assert "replace made-in-the-ui-7 --cron '*/5 * * * *'" in shown.stderr
    for word in ("nightly", first["id"], first["id"][:8]):
        found = json.loads(call("schedule", "show", word, "--json").stdout)
        assert (found["id"], found["runs"][0]["run_id"]) == (first["id"], run["run_id"])
    assert f"{run['run_id'][:8]} pending" in call("schedule", "show", "nightly").output
    assert "did you mean 'nightly'" in refused(call, "show", "nightl")
    gone = "c1000000-0000-4000-8000-000000000000"
    assert f"there is no schedule {gone}" in refused(call, "show", gone)


def test_pause_and_resume(call: Call, kfp_server: KfpServer, own: str) -> None:
    create(call)
    assert "nightly" in (paused := call("schedule", "pause", "nightly").output)
    assert "is paused" in paused
    assert kept(kfp_server)[0][2] == "DISABLED"
    assert "is enabled" in call("schedule", "resume", "nightly").output
    assert kept(kfp_server)[0][2] == "ENABLED"


@pytest.mark.parametrize("latest", [True, False])
def test_run_now_runs_what_the_schedule_would(
    call: Call, kfp_server: KfpServer, own: str, latest: bool
) -> None:
    told = create(call, "nightly", *(["--latest"] if latest else []))
    schedule = kfp_server.store.recurring_runs[told["id"]]
    newest = new_version(kfp_server, own, "own-2")
    done = call("schedule", "run-now", "nightly")
    assert done.exception is None, done.output
    (run,) = kfp_server.store.runs.values()
    assert run["runtime_config"] == {"parameters": {"rounds": 3}}
    assert run["experiment_id"] == schedule["experiment_id"]
    used = run["pipeline_version_reference"]["pipeline_version_id"]
    assert (used == newest) == latest
    assert f"{kfp_server.url}/#/runs/details/{run['run_id']}" in done.output


def test_replace_changes_what_is_given_and_keeps_the_rest(
    call: Call, kfp_server: KfpServer, own: str
) -> None:
    old = create(call, "nightly", "--set", "rate=0.5", "--experiment", "flowers")
    newest = new_version(kfp_server, own, "own-2")
    was = dict(kfp_server.store.recurring_runs[old["id"]])
    done = call("schedule", "replace", "nightly", "--cron", "30 4 * * 1", "--set", "rounds=5")
    assert done.exception is None, done.output
    (new,) = kfp_server.store.recurring_runs.values()
    assert new["recurring_run_id"] != old["id"]
    assert new["trigger"] == {"cron_schedule": {"cron": "0 30 4 * * 1"}}
    assert new["runtime_config"]["parameters"] == {"rounds": 5, "rate": 0.5}
    same = ("display_name", "experiment_id", "pipeline_version_reference", "status", "no_catchup")
    assert [new[name] for name in same] == [was[name] for name in same]

    words = ("--pinned", "--unset", "rate", "--max-concurrency", "2", "--catchup")
    assert call("schedule", "replace", "nightly", *words).exception is None
    (newer,) = kfp_server.store.recurring_runs.values()
    assert newer["pipeline_version_reference"]["pipeline_version_id"] == newest
    assert newer["trigger"] == new["trigger"]
    assert newer["runtime_config"]["parameters"] == {"rounds": 5}
    assert (newer["max_concurrency"], newer.get("no_catchup", False)) == ("2", False)

    assert call("schedule", "replace", "nightly", "--latest").exception is None
    (newest_of_all,) = kfp_server.store.recurring_runs.values()
    assert newest_of_all["pipeline_version_reference"] == {"pipeline_id": own}


def test_replace_ends_no_run_and_the_next_one_tidies_up(
    call: Call, kfp_server: KfpServer, own: str
) -> None:
    old = create(call)
    run = kfp_server.store.trigger(old["id"])
    done = call("schedule", "replace", "nightly", "--cron", "0 5 * * *")
    assert done.exception is None, done.output
    assert f"({old['id'][:8]}) is paused and stays until its run is over" in done.stderr
    assert kept(kfp_server) == [
        ("nightly", "0 0 3 * * *", "DISABLED"),
        ("nightly", "0 0 5 * * *", "ENABLED"),
    ]
    shown = json.loads(call("schedule", "show", "nightly", "--json").stdout)
    assert shown["cron"] == "0 0 5 * * *"
    kfp_server.store.set_state(run["run_id"], "SUCCEEDED")
    assert call("schedule", "replace", "nightly", "--cron", "0 6 * * *").exception is None
    assert kept(kfp_server) == [("nightly", "0 0 6 * * *", "ENABLED")]


def test_never_are_both_enabled_and_the_new_one_is_there_before_the_old_one_stops(
    call: Call, kfp_server: KfpServer, own: str
) -> None:
    create(call)
    begin = len(kfp_server.requests)
    assert call("schedule", "replace", "nightly", "--cron", "0 5 * * *").exception is None
    changes = [one for one in kfp_server.requests[begin:] if one.method != "GET"]
    names = ["create", "disable", "enable", "delete"]
    assert [one.operation for one in changes] == [f"{name}_recurring_run" for name in names]
    assert changes[0].body["mode"] == "DISABLE"


@pytest.mark.parametrize("step", ["create_recurring_run", "disable_recurring_run"])
def test_a_replace_that_fails_leaves_the_old_one_as_it_was(
    call: Call, kfp_server: KfpServer, own: str, step: str
) -> None:
    create(call)
    kfp_server.fail(step, faults.status(403, "no right"), 1)
    done = call("schedule", "replace", "nightly", "--cron", "0 5 * * *")
    assert isinstance(done.exception, RefusedError)
    assert kept(kfp_server) == [("nightly", "0 0 3 * * *", "ENABLED")]


def test_a_replace_whose_last_step_fails_says_how_to_go_on(
    call: Call, kfp_server: KfpServer, own: str
) -> None:
    create(call)
    kfp_server.fail("enable_recurring_run", faults.status(500), 1)
    done = call("schedule", "replace", "nightly", "--cron", "0 5 * * *")
    assert isinstance(done.exception, ServerError)
    new = list(kfp_server.store.recurring_runs)[-1]
    assert f"kfp-ddp schedule resume {new}" in str(done.exception)
    assert call("schedule", "resume", new).exception is None
    assert [status for _, _, status in kept(kfp_server)] == ["DISABLED", "ENABLED"]


def test_a_paused_one_stays_paused_when_replaced_and_a_misread_one_needs_a_cron(
    call: Call, kfp_server: KfpServer, own: str
) -> None:
    told = create(call, "nightly", "--paused")
    assert call("schedule", "replace", "nightly", "--set", "rounds=4").exception is None
    assert kept(kfp_server) == [("nightly", "0 0 3 * * *", "DISABLED")]
    assert told["id"] not in kfp_server.store.recurring_runs
    (schedule,) = kfp_server.store.recurring_runs.values()
    schedule["trigger"]["cron_schedule"]["cron"] = "0 3 * * *"
    assert "give --cron" in refused(call, "replace", "nightly", "--set", "rounds=4")
    said = refused(call, "replace", "nightly", "--cron", "0 3 * * *", "--unset", "rat")
    assert "--unset rat: the schedule does not set it" in said
    assert call("schedule", "replace", "nightly", "--cron", "0 3 * * *").exception is None
    assert kept(kfp_server) == [("nightly", "0 0 3 * * *", "DISABLED")]


def test_delete_does_not_end_a_run_unless_told_to(
    call: Call, kfp_server: KfpServer, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = create(call)
    run = kfp_server.store.trigger(told["id"])
    said = refused(call, "delete", "nightly")
    assert f"the run {run['run_id'][:8]} of nightly goes on, and KFP would end it" in said
    assert kept(kfp_server) == [("nightly", "0 0 3 * * *", "ENABLED")]
    assert "do not go together" in refused(call, "delete", "nightly", "--wait", "--force")

    def while_it_waits(_: float) -> None:
        assert kept(kfp_server)[0][2] == "DISABLED"
        kfp_server.store.set_state(run["run_id"], "FAILED")

    monkeypatch.setattr(scheduling, "sleep", while_it_waits)
    assert call("schedule", "delete", "nightly", "--wait").exception is None
    assert kept(kfp_server) == []

    told = create(call)
    kfp_server.store.trigger(told["id"])
    done = call("schedule", "delete", "nightly", "--force", "--json")
    assert json.loads(done.stdout) == {"deleted": told["id"], "name": "nightly"}
    assert kept(kfp_server) == []


def test_two_enabled_ones_of_one_name_from_elsewhere_are_told_apart_by_id(
    call: Call, kfp_server: KfpServer, own: str
) -> None:
    first = create(call)
    body = {**kfp_server.store.recurring_runs[first["id"]], "mode": "ENABLE"}
    second = kfp_server.store.create_recurring_run(body, {})["recurring_run_id"]
    assert "is 2 schedules" in refused(call, "pause", "nightly")
    assert call("schedule", "pause", second[:8]).exception is None
    assert "is paused" in call("schedule", "pause", "nightly").output
    assert [status for _, _, status in kept(kfp_server)] == ["DISABLED", "DISABLED"]
