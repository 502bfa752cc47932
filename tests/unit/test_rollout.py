"""Rollouts on an API server in memory, also of several runs at once."""

import copy
import itertools
import json
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.rollout import rollout
from kfp_ddp.rollout.rollout import (
    MODE,
    PERCENT,
    SPEC,
    VERSION,
    Service,
    canary_of,
    check_kserve,
    is_unfinished,
    label,
    labelled,
    previous_of,
    roll_back_run,
    stable_of,
    versions_in_service,
)

GROUP = "/apis/serving.kserve.io/v1beta1"
LIST = f"{GROUP}/namespaces/here/inferenceservices"
SHOP = f"{LIST}/shop"
ACCOUNT = "system:serviceaccount:here:default"


class Server(Api):
    """InferenceServices in memory, with compare-and-set by resourceVersion."""

    def __init__(self) -> None:
        super().__init__(None, "here")
        self.objects: dict[str, Object] = {}
        self.versions = itertools.count(1)
        self.lose_answers = 0
        """Number of changes whose answer is lost."""
        self.refuse: dict[str, int] = {}
        self.resources = [{"name": "inferenceservices"}]
        self.mode = "Knative"
        self.refused_field = ""

    def ready(self) -> bool:
        return True

    def call(
        self, method: str, path: str, body: Any = None, query: Any = None, *_: Any, **named: Any
    ) -> Object:
        if method in self.refuse:
            raise ApiError(self.refuse[method], "No", f'User "{ACCOUNT}" cannot {method} that')
        if path == GROUP:
            return {"resources": self.resources}
        if path == LIST:
            return {"items": list(self.objects.values())}
        if method == "APPLY" and self.refused_field in body["spec"]:
            message = f"failed to create typed patch object: .spec.{self.refused_field}: not known"
            raise ApiError(500, "Internal Server Error", message)
        if method == "APPLY":
            return self.put(path, body, dry="dryRun" in query)
        if path not in self.objects:
            raise ApiError(404, "Not Found", f"{path} not found")
        if method == "DELETE":
            uid = self.objects[path]["metadata"]["uid"]
            assert body["preconditions"]["uid"] == uid
            return self.objects.pop(path)
        return copy.deepcopy(self.objects[path])

    def put(self, path: str, body: Object, dry: bool = False) -> Object:
        existing = self.objects.get(path)
        version = body["metadata"].get("resourceVersion")
        if existing and version != existing["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "it was changed")
        changed: Object = copy.deepcopy(body)
        changed["metadata"] |= {"resourceVersion": str(next(self.versions)), "uid": "1"}
        changed["metadata"].setdefault("annotations", {})[MODE] = self.mode
        if dry:
            return changed
        self.objects[path] = changed
        if self.lose_answers:
            self.lose_answers -= 1
            raise ApiError(0, "", "no answer")
        return copy.deepcopy(changed)

    def touch(self, path: str = SHOP) -> None:
        """Change the version, as a controller that writes the status."""
        self.objects[path]["metadata"]["resourceVersion"] = str(next(self.versions))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(rollout, "_PAUSE", 0.0)
    return Server()


def model(number: int, run: str = "run-1", **more: Any) -> Object:
    version = f"{number:012x}"
    uri = f"gs://models/{version}"
    return labelled({"model": {"storageUri": uri, **more}, "minReplicas": 2}, version, uri, run)


def spec(number: int) -> str:
    return label(model(number), SPEC)


def answering(server: Server, number: int) -> Service:
    """Return a service that serves only this model."""
    service = Service(server, "shop")
    started = service.begin(model(number), 10)
    service.finish(stable_of(started), previous_of(started))
    return service


def state(server: Server) -> tuple[str, int | None, str]:
    """Return the version of the service, its share, and the recorded version before it."""
    service = server.objects[SHOP]
    previous, predictor = previous_of(service) or {}, stable_of(service)
    share = predictor.get(PERCENT)
    return label(predictor, VERSION)[-1:], share, label(previous, VERSION)[-1:]


def test_the_previous_model_remains_recorded_after_promotion(server: Server) -> None:
    """A changed annotation would restart the pods, as it is part of KServe's template."""
    service = answering(server, 1)
    assert state(server) == ("1", None, "")
    assert server.objects[SHOP]["metadata"]["labels"] == rollout.OURS
    for _ in range(3):  # a repeated step
        started = service.begin(model(2), 10)
        assert is_unfinished(started)
        assert state(server) == ("2", 10, "1")
    annotations = copy.deepcopy(server.objects[SHOP]["metadata"]["annotations"])
    service.finish(stable_of(started), previous_of(started))
    assert state(server) == ("2", None, "1")
    assert server.objects[SHOP]["metadata"]["annotations"] == annotations


def test_only_another_predictor_starts_a_rollout(server: Server) -> None:
    service = answering(server, 1)
    version = server.objects[SHOP]["metadata"]["resourceVersion"]
    assert not is_unfinished(service.begin(model(1, "run-2"), 10))
    assert server.objects[SHOP]["metadata"]["resourceVersion"] == version
    assert is_unfinished(service.begin(model(1, args=["more"]), 10))


def test_a_run_that_takes_over_rolls_back_to_the_model_before_both(server: Server) -> None:
    service = answering(server, 1)
    service.begin(model(2, "run-2"), 10)
    service.begin(model(3, "run-3"), 20)
    assert state(server) == ("3", 20, "1")
    for act in (lambda: service.finish(model(2), None), lambda: service.roll_back(spec(2))):
        with pytest.raises(JobError, match="shop was given another model by run-3 meanwhile"):
            act()
    assert f"{1:012x}" in service.roll_back(spec(3))
    assert state(server) == ("1", 0, "")


def test_a_rollback_is_final_and_does_not_block_the_next_rollout(server: Server) -> None:
    service = answering(server, 1)
    service.begin(model(2), 10)
    service.roll_back(spec(2))
    assert not is_unfinished(server.objects[SHOP])
    service.begin(model(3), 10)
    assert state(server) == ("3", 10, "1")
    assert PERCENT not in (previous_of(server.objects[SHOP]) or {})
    service.roll_back(spec(3))
    assert not is_unfinished(service.begin(model(1), 10))
    assert state(server) == ("1", None, "")


def test_a_failed_first_model_is_deleted_unless_another_run_replaced_it(server: Server) -> None:
    service = Service(server, "shop")
    service.begin(model(1), 10)
    service.begin(model(2, "run-2"), 10)
    with pytest.raises(JobError, match="shop was given another model by run-2 meanwhile"):
        service.roll_back(spec(1))
    assert state(server) == ("2", 10, "")
    assert "was deleted" in service.roll_back(spec(2))
    assert server.objects == {}
    service.roll_back(spec(2))


def test_requests_with_lost_answers_are_repeated(server: Server) -> None:
    service = answering(server, 1)
    server.lose_answers = 1
    started = service.begin(model(2), 10)
    assert state(server) == ("2", 10, "1")
    server.lose_answers = 1
    service.roll_back(spec(2))
    server.lose_answers = 1
    service.finish(previous_of(started) or {}, None)
    assert state(server) == ("1", None, "")


def test_a_changed_status_is_no_conflict(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    service, find, touches = answering(server, 1), Service.find, iter([True, True])

    def change_after(self: Service) -> Object | None:
        service = find(self)
        if next(touches, False):
            server.touch()
        return service

    monkeypatch.setattr(Service, "find", change_after)
    assert is_unfinished(service.begin(model(2), 10))


def test_a_cancelled_run_rolls_back_only_its_own_rollout(server: Server) -> None:
    answering(server, 1).begin(model(2, "run-2"), 10)
    other = Service(server, "window")
    other.begin(model(3, "run-3"), 10)
    assert roll_back_run(server, "run-1") == []
    (line,) = roll_back_run(server, "run-2")
    assert f"{1:012x}" in line
    assert roll_back_run(server, "run-2") == []
    assert is_unfinished(server.objects[f"{LIST}/{other.name}"])


def tried(server: Server) -> str:
    """Return the version that is tried beside the answering one."""
    return label(canary_of(server.objects[SHOP]), VERSION)[-1:]


def test_in_standard_mode_the_answering_pods_do_not_change_during_a_trial(server: Server) -> None:
    server.mode = "Standard"
    service = answering(server, 1)
    assert canary_of(service.begin(model(2), 10))
    started = service.promote(model(2), 10)
    first = copy.deepcopy(service.finish(stable_of(started), previous_of(started)))
    started = service.begin(model(3, "run-3"), 10)
    assert (state(server), tried(server)) == (("2", None, "1"), "3")
    assert started["metadata"]["annotations"] == first["metadata"]["annotations"]
    # KServe takes the canary's pod off these.
    assert started["spec"]["predictor"] == first["spec"]["predictor"] | {"minReplicas": 3}
    assert versions_in_service(server) == {f"{number:012x}" for number in (1, 2, 3)}
    service.begin(model(4, "run-4"), 10)
    with pytest.raises(JobError, match="shop was given another model by run-4 meanwhile"):
        service.promote(model(3, "run-3"), 10)
    assert roll_back_run(server, "run-3") == []
    assert f"{2:012x}" in roll_back_run(server, "run-4")[0]
    assert server.objects[SHOP]["spec"] == first["spec"]


@pytest.mark.parametrize(("more", "refused"), [({"args": ["of the old one"]}, ""), ({}, "canary")])
def test_model_without_canary(server: Server, more: dict[str, Any], refused: str) -> None:
    """A canary takes fields of the other, and KServe before 0.20 has no such field.

    The API server answers that with 500, for which other requests are repeated.
    """
    server.mode, server.refused_field = "Standard", refused
    service = Service(server, "shop")
    service.finish(service.begin(model(1, **more), 10)["spec"]["predictor"], None)
    service.begin(model(2), 10)
    assert (state(server), tried(server)) == (("2", 10, "1"), "")


def test_pods_wait_before_they_stop_in_standard_mode(server: Server) -> None:
    service = Service(server, "shop")
    assert service.with_pre_stop(model(1)) == model(1)
    server.mode = "Standard"
    assert "preStop" in service.with_pre_stop(model(1))["model"]["lifecycle"]
    assert server.objects == {}


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        ({"APPLY": 403}, "no right to patch inferenceservices in namespace here as .*; apply"),
        ({"GET": 403}, "no right to get inferenceservices in namespace here as .*; apply deploy"),
        ({"APPLY": 422}, "cannot patch inferenceservices shop in namespace here: User"),
    ],
)
def test_a_refusal_is_one_line(server: Server, refused: dict[str, int], text: str) -> None:
    server.refuse = refused
    with pytest.raises(InputError, match=text):
        Service(server, "shop").begin(model(1), 10)


def test_a_cluster_without_kserve_is_an_error(server: Server) -> None:
    check_kserve(server)
    server.resources = []
    with pytest.raises(InputError, match="install KServe"):
        Service(server, "shop").begin(model(1), 10)
    assert server.objects == {}
    server.refuse = {"GET": 404}
    assert roll_back_run(server, "run-1") == []
    with pytest.raises(InputError, match="install KServe"):
        check_kserve(server)


def test_a_service_of_others_is_not_changed(server: Server) -> None:
    theirs: Object = {"metadata": {"name": "shop", "uid": "2", "resourceVersion": "0"}}
    server.objects[SHOP] = theirs | {"spec": {"predictor": {"containers": []}}}
    unchanged = json.dumps(server.objects)
    service = Service(server, "shop")
    for act in (lambda: service.begin(model(1), 10), lambda: service.roll_back(spec(1))):
        with pytest.raises(InputError, match="was not made by kfp-ddp and is not changed"):
            act()
    assert json.dumps(server.objects) == unchanged


def test_current_and_previous_versions_are_in_service(server: Server) -> None:
    assert versions_in_service(server) == set()
    service = answering(server, 1)
    for number in (2, 3):
        started = service.begin(model(number), 10)
        assert versions_in_service(server) == {f"{1:012x}", f"{number:012x}"}
        service.roll_back(label(stable_of(started), SPEC))
        assert f"{1:012x}" in versions_in_service(server)
    server.refuse = {"GET": 404}
    assert versions_in_service(server) == set(), "there is no KServe"
    server.refuse = {"GET": 403}
    with pytest.raises(JobError, match="no right to list inferenceservices"):
        versions_in_service(server)


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_a_damaged_annotation_is_one_line(text: str) -> None:
    service = {"metadata": {"name": "shop", "annotations": {rollout.PREVIOUS: text}}}
    with pytest.raises(InputError, match="of InferenceService shop is invalid"):
        previous_of(service)
