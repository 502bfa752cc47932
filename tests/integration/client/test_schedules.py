"""`kfp-ddp schedule`: create, list, pause, start, on a stand-in of KFP."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.commands import call, document, output, refused
from tests.kfp_server.server import KfpServer, serving
from tests.schedules import COMPILED, create, new_version, stored, uploaded

pytestmark = pytest.mark.usefixtures("configured")


@pytest.fixture(autouse=True)
def own(kfp_server: KfpServer) -> str:
    return uploaded(kfp_server)


def test_a_cron_of_five_fields_is_sent_as_six(kfp_server: KfpServer) -> None:
    words = ("--pipeline", "own", "--cron", "0 3 * * *", "--set", "rounds=3")
    shown = output("schedule", "create", "nightly", *words)
    (schedule,) = kfp_server.store.recurring_runs.values()
    assert schedule["trigger"] == {"cron_schedule": {"cron": "0 0 3 * * *"}}
    assert schedule["runtime_config"] == {"parameters": {"rounds": 3}}
    assert (schedule["no_catchup"], schedule["max_concurrency"]) == (True, "1")
    version = schedule["pipeline_version_reference"]["pipeline_version_id"]
    assert kfp_server.store.versions[version]["name"] == "own"
    day = datetime.now(UTC) + timedelta(days=datetime.now(UTC).hour >= 3)
    for part in ("is enabled", f"next          {day:%Y-%m-%d} 03:00, ", "own@own", "rounds=3"):
        assert part in shown


def test_options_arrive(kfp_server: KfpServer, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    created = create(
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
    monkeypatch.setenv("KFP_DDP_TIME_ZONE", "Europe/Vienna")
    resumed = document("schedule", "resume", "weekly")
    assert resumed["next"][0] == "2098-01-01T03:00:00+01:00"
    assert created["pipeline"] == "own, always the newest version"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cron", "0 3 31 2 *"), "never runs"),
        (("--end", "2020-01-01"), "end=2020-01-01T00:00:00+00:00 is in the past"),
        (("--start", "2020-01-01"), "is in the past: leave it out, or give --catchup"),
        (("--start", "2098-01-02", "--end", "2098-01-01"), "has no time before end="),
        (("--start", "tomorrow"), "start='tomorrow' is not a time"),
        (("--set", "training={a: 'https://me:b@x'}"), "training.a is an address with a login"),
        (("--pipeline", "owm"), "the server has no pipeline 'owm'"),
        (("--pipeline", "train_resnet@2"), "has no pipeline 'train-resnet' yet: upload it by"),
        (("--pipeline", "own@2"), "has no version '2'"),
        (("--pipeline", "own@own", "--latest"), "exclude each other"),
        (("--pipeline", ""), "--pipeline is missing"),
    ],
)
def test_invalid_input_fails(kfp_server: KfpServer, words: tuple[str, ...], message: str) -> None:
    given = ("--pipeline", "own", "--cron", "0 3 * * *", "--set", "rounds=3")
    assert message in refused("schedule", "create", "nightly", *given, *words)
    assert not kfp_server.store.recurring_runs
    assert len(kfp_server.store.experiments) == 1


def test_our_pipelines_are_checked_as_a_run_of_them_is(kfp_server: KfpServer) -> None:
    kfp_server.store.upload_pipeline(COMPILED.read_bytes(), {"name": "train-resnet"})
    words = ("--pipeline", "train-resnet", "--cron", "0 3 * * *")
    assert "source is missing" in refused("schedule", "create", "nightly", *words)
    source = ("--set", "source=gs://photos/flowers")
    message = refused("schedule", "create", "nightly", *words, *source, "--set", "nodes=1.5")
    assert "nodes=1.5 cannot be used" in message
    assert not kfp_server.store.recurring_runs
    Path("file.yaml").write_text("destination: gs://file/models\n")
    over = ("-f", "file.yaml", "--destination", "gs://photos/models")
    as_uploaded = ("--pipeline", "train_resnet", *over)
    output("schedule", "create", "nightly", *words, *source, *as_uploaded)
    (schedule,) = kfp_server.store.recurring_runs.values()
    given = schedule["runtime_config"]["parameters"]
    assert given == {"source": "gs://photos/flowers", "destination": "gs://photos/models"}


def test_list_and_show_find_by_name_and_id(kfp_server: KfpServer, own: str) -> None:
    assert call("schedule", "list").stderr == "no schedules\n"
    first = create()
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
    created = document("schedule", "list")
    assert len(created) == 102
    other = next(one for one in created if one["name"] == "made-in-the-ui-7")
    assert other["when"] == "Every 5 seconds, every minute, every hour, every day"
    assert "of which KFP reads the first as seconds" in other["warning"]
    shown = call("schedule", "list")
    assert "At 03:00, every day" in shown.stdout
    assert "replace made-in-the-ui-7 --cron '*/5 * * * *'" in shown.stderr
    for word in ("nightly", first["id"], first["id"][:8]):
        shown = document("schedule", "show", word)
        assert (shown["id"], shown["runs"][0]["run_id"]) == (first["id"], run["run_id"])
    assert f"{run['run_id'][:8]} pending" in call("schedule", "show", "nightly").output
    assert "did you mean 'nightly'" in refused("schedule", "show", "nightl")
    gone = "c1000000-0000-4000-8000-000000000000"
    assert f"there is no schedule {gone}" in refused("schedule", "show", gone)


@pytest.mark.parametrize("latest", [True, False])
def test_run_now_uses_schedule(kfp_server: KfpServer, own: str, latest: bool) -> None:
    created = create("nightly", *(["--latest"] if latest else []))
    schedule = kfp_server.store.recurring_runs[created["id"]]
    newest = new_version(kfp_server, own, "own-2")
    shown = output("schedule", "run-now", "nightly")
    (run,) = kfp_server.store.runs.values()
    assert run["runtime_config"] == {"parameters": {"rounds": 3}}
    assert run["experiment_id"] == schedule["experiment_id"]
    used = run["pipeline_version_reference"]["pipeline_version_id"]
    assert (used == newest) == latest
    assert f"{kfp_server.url}/#/runs/details/{run['run_id']}" in shown


def test_schedules_of_one_name_need_an_id(kfp_server: KfpServer) -> None:
    first = create()
    words = ("--pipeline", "own", "--cron", "0 4 * * *", "--set", "rounds=4")
    assert "schedule 'nightly' already exists" in refused("schedule", "create", "nightly", *words)
    body = {**kfp_server.store.recurring_runs[first["id"]], "mode": "ENABLE"}
    second = kfp_server.store.create_recurring_run(body, {})["recurring_run_id"]
    assert "matches 2 schedules" in refused("schedule", "pause", "nightly")
    output("schedule", "replace", second[:8], "--cron", "0 5 * * *")
    crons = [("nightly", f"0 0 {hour} * * *", "ENABLED") for hour in (3, 5)]
    assert stored(kfp_server) == crons, "the other one is left as it is"
    output("schedule", "pause", [*kfp_server.store.recurring_runs][-1])
    assert "is paused" in call("schedule", "pause", "nightly").output
    assert [status for _, _, status in stored(kfp_server)] == ["DISABLED", "DISABLED"]


def test_older_runs_are_not_requested(kfp_server: KfpServer) -> None:
    created = create()
    run = kfp_server.store.trigger(created["id"])
    for number in range(250):
        old = {**run, "run_id": f"{number:08}-0000-4000-8000-000000000000"}
        old |= {"created_at": "2020-01-01T00:00:00Z", "recurring_run_id": "another"}
        kfp_server.store.runs[old["run_id"]] = old
    assert document("schedule", "show", "nightly")["runs"]
    assert len(kfp_server.requests_for("list_runs")) == 1


def test_a_multi_user_schedule_has_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(multi_user=True) as server:
        uploaded(server)
        monkeypatch.setenv("KFP_DDP_HOST", server.url)
        monkeypatch.setenv("KFP_DDP_NAMESPACE", "kubeflow-user")
        created = create()
        (schedule,) = server.store.recurring_runs.values()
        assert schedule["namespace"] == "kubeflow-user"
        listed = document("schedule", "list")
        assert [one["id"] for one in listed] == [created["id"]]
        output("schedule", "replace", "nightly", "--cron", "0 5 * * *")
        assert stored(server) == [("nightly", "0 0 5 * * *", "ENABLED")]
        assert not server.violations
