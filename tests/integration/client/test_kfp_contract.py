"""The stand-in of KFP answers as recorded from a real 2.17 server."""

import json
import re
import urllib.request
from typing import Any
from urllib.error import HTTPError

import pytest
import requests

from tests.kfp_server import contract
from tests.kfp_server.runs import Store
from tests.kfp_server.server import MULTI_USER, RECORDED, KfpServer, serving

PIPELINE, VERSION = "678ed99d-7cc9-410a-a99d-e6533b66bc57", "e534b044-8c74-4b71-b4a7-611f415b15f2"
RECURRING = "3a073443-eb30-446c-af84-d572c029566f"
NAMES = sorted(path.stem for path in RECORDED.glob("*.json"))
IGNORED = {"run_details", "pipeline_spec", "next_page_token", "total_size", "state_history"}
"""Fields that depend on more than the request."""


def recorded(name: str) -> dict[str, Any]:
    return dict(json.loads((RECORDED / f"{name}.json").read_text()))


def form(value: Any) -> Any:
    """Replace ids and times by placeholders."""
    if isinstance(value, dict):
        return {key: form(item) for key, item in value.items() if key not in IGNORED}
    if isinstance(value, list):
        return [form(item) for item in value]
    if isinstance(value, str):
        value = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", value)
        return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "TIME", value).partition("\n")[0]
    return value


@pytest.fixture
def as_recorded(kfp_server: KfpServer) -> KfpServer:
    """A server with the state of the recorded one."""
    store: Store = kfp_server.store
    store.experiments.clear()
    for one in recorded("experiments_list")["answer"]["experiments"]:
        store.experiments[one["experiment_id"]] = one
    for one in recorded("pipelines_list")["answer"]["pipelines"][::-1]:
        store.pipelines[one["pipeline_id"]] = one
    inputs = {"source": {"parameterType": "STRING"}}
    optional = {"epochs": {"parameterType": "NUMBER_INTEGER", "isOptional": True}}
    spec = {"root": {"inputDefinitions": {"parameters": inputs | optional}}}
    store.versions[VERSION] = recorded("version_get")["answer"] | {"pipeline_spec": spec}
    for name in ("succeeded", "failed", "terminated"):
        kfp_server.record(f"run_get_{name}")
    for name in ("5_fields", "6_fields", "at_daily"):
        answer = recorded(f"recurring_create_{name}")["answer"]
        store.recurring_runs[answer["recurring_run_id"]] = answer
    store.recurring_runs[RECURRING] = dict(recorded("recurring_get")["answer"])
    return kfp_server


def ask(server: KfpServer, request: dict[str, Any], content: bytes) -> tuple[int, Any]:
    data = None if request["body"] is None else json.dumps(request["body"]).encode()
    headers = {"Content-Type": "application/json"}
    if "/upload" in request["path"]:
        head = b'--x\r\nContent-Disposition: form-data; name="uploadfile"; filename="a"\r\n\r\n'
        data, headers = head + content + b"\r\n--x--\r\n", {}
        headers["Content-Type"] = "multipart/form-data; boundary=x"
    record = urllib.request.Request(
        server.url + request["path"], data, headers, method=request["method"]
    )
    try:
        with urllib.request.urlopen(record) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("_list")])
def test_a_request_is_answered_as_it_was_recorded(as_recorded: KfpServer, name: str) -> None:
    record = recorded(name)
    if name == "recurring_get_disabled":
        as_recorded.store.disable_recurring_run({}, RECURRING)
    content = b"pipelineInfo: {name: a}\n" if name == "upload_same_name" else b"a: 1\n"
    status, answer = ask(as_recorded, record["request"], content)
    assert status == record["status"], answer
    assert form(answer) == form(record["answer"])


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_list")])
def test_a_list_holds_what_the_recorded_one_did(as_recorded: KfpServer, name: str) -> None:
    record = recorded(name)
    status, answer = ask(as_recorded, record["request"], b"")
    assert status == 200
    ((field, rows),) = form(answer).items()
    assert set(form(record["answer"])) == {field}
    known = {key for row in form(record["answer"])[field] for key in row}
    assert {key for row in rows for key in row} <= known | {"description", "service_account"}


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_answer_is_of_the_contract(name: str) -> None:
    record = recorded(name)
    path = record["request"]["path"].partition("?")[0]
    known = (one for one in contract.operations() if one.method == record["request"]["method"])
    operation = next(one for one in known if one.path.fullmatch(path))
    if record["status"] == 200 and operation.name != "get_healthz":
        assert contract.faults(record["answer"], operation.answer, "answer") == []


@pytest.mark.parametrize("name", sorted(path.stem for path in MULTI_USER.glob("*.json")))
def test_a_server_of_several_users_answers_as_recorded(name: str) -> None:
    record = json.loads((MULTI_USER / f"{name}.json").read_text())
    with serving(multi_user=True) as server:
        server.store.namespaces = [] if "stranger" in name else ["team-a"]
        server.store.experiments["e"] = {"experiment_id": "e", "namespace": "team-a"}
        server.cookie = "session=alice" if name == "no_cookie" else ""
        server.record("multi_user/run_get")
        log = json.loads((MULTI_USER / "node_log.json").read_text())
        server.logs[log["request"]["path"].split("/")[-2]] = log["body"].encode()
        url = server.url + record["request"]["path"]
        answer = requests.get(url, allow_redirects=False, timeout=10)
    assert answer.status_code == record["status"]
    assert bool(answer.headers.get("Location")) == bool(record["location"])
    if not isinstance(record["body"], dict):
        assert answer.text == record["body"]
    elif answer.status_code == 200:
        assert set(answer.json()) == set(record["body"])
    else:
        assert answer.json()["code"] == record["body"]["code"]


def test_what_is_not_of_the_contract_is_refused_and_remembered(kfp_server: KfpServer) -> None:
    body = {"display_name": 3, "nme": "a"}
    request = {"method": "POST", "path": "/apis/v2beta1/experiments?page=1", "body": body}
    status, answer = ask(kfp_server, request, b"")
    assert (status, answer["code"]) == (400, 3)
    assert kfp_server.violations == [
        "create_experiment: query page",
        "create_experiment: body.display_name=3 should be str",
        "create_experiment: body.nme is no field of V2beta1Experiment",
    ]
    kfp_server.violations.clear()
