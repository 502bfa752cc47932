"""Rollouts on an API server in memory, also of several runs at once, and with Knative."""

import copy
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.k8s.resource import PODS, Resource
from kfp_ddp.models.interface import Sample, _Image
from kfp_ddp.models.release import Deployment
from kfp_ddp.rollout import engine, rollout
from kfp_ddp.rollout.rollout import (
    MARK,
    MODE,
    SPEC,
    TAGGED,
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
from tests.serving import Handler, serving_by

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
    started = service.begin(model(number))
    service.finish(stable_of(started), previous_of(started))
    return service


def state(server: Server) -> tuple[str, bool, str]:
    """Return the version of the service, whether it has the mark, and the recorded version."""
    service = server.objects[SHOP]
    previous = previous_of(service) or {}
    predictor = stable_of(service)
    return label(predictor, VERSION)[-1:], MARK in predictor, label(previous, VERSION)[-1:]


def test_the_previous_model_remains_recorded_after_promotion(server: Server) -> None:
    """A changed annotation would restart the pods, as it is part of KServe's template."""
    service = answering(server, 1)
    assert state(server) == ("1", False, "")
    assert server.objects[SHOP]["metadata"]["labels"] == rollout.OURS
    for _ in range(3):  # a repeated step
        started = service.begin(model(2))
        assert is_unfinished(started)
        assert state(server) == ("2", True, "1")
        assert stable_of(started)[MARK] == 100, "all requests for the new revision of Knative"
    annotations = copy.deepcopy(server.objects[SHOP]["metadata"]["annotations"])
    service.finish(stable_of(started), previous_of(started))
    assert state(server) == ("2", False, "1")
    assert server.objects[SHOP]["metadata"]["annotations"] == annotations


def test_only_another_predictor_starts_a_rollout(server: Server) -> None:
    service = answering(server, 1)
    version = server.objects[SHOP]["metadata"]["resourceVersion"]
    assert not is_unfinished(service.begin(model(1, "run-2")))
    assert server.objects[SHOP]["metadata"]["resourceVersion"] == version
    assert is_unfinished(service.begin(model(1, args=["more"])))


def test_a_run_that_takes_over_rolls_back_to_the_model_before_both(server: Server) -> None:
    service = answering(server, 1)
    service.begin(model(2, "run-2"))
    service.begin(model(3, "run-3"))
    assert state(server) == ("3", True, "1")
    for act in (lambda: service.finish(model(2), None), lambda: service.roll_back(spec(2))):
        with pytest.raises(JobError, match="shop was given another model by run-3 meanwhile"):
            act()
    assert f"{1:012x}" in service.roll_back(spec(3))
    assert state(server) == ("1", False, "")


def test_the_share_of_an_earlier_version_is_no_obstacle(server: Server) -> None:
    """A killed rollback left 0 %, and an annotation without which the pods would restart."""
    server.mode = "Standard"
    service = answering(server, 1)
    server.objects[SHOP]["spec"]["predictor"][MARK] = 0
    server.objects[SHOP]["metadata"]["annotations"][TAGGED] = "true"
    assert not is_unfinished(service.begin(model(1)))
    tried_beside = service.begin(model(2))
    assert tried_beside["metadata"]["annotations"][TAGGED] == "true"
    assert MARK not in tried_beside["spec"]["predictor"]


def test_a_rollback_is_final_and_does_not_block_the_next_rollout(server: Server) -> None:
    service = answering(server, 1)
    service.begin(model(2))
    service.roll_back(spec(2))
    assert not is_unfinished(server.objects[SHOP])
    service.begin(model(3))
    assert state(server) == ("3", True, "1")
    assert MARK not in (previous_of(server.objects[SHOP]) or {})
    service.roll_back(spec(3))
    assert not is_unfinished(service.begin(model(1)))
    assert state(server) == ("1", False, "")


def test_a_failed_first_model_is_deleted_unless_another_run_replaced_it(server: Server) -> None:
    service = Service(server, "shop")
    service.begin(model(1))
    service.begin(model(2, "run-2"))
    with pytest.raises(JobError, match="shop was given another model by run-2 meanwhile"):
        service.roll_back(spec(1))
    assert state(server) == ("2", True, "")
    assert "was deleted" in service.roll_back(spec(2))
    assert server.objects == {}
    service.roll_back(spec(2))


def test_requests_with_lost_answers_are_repeated(server: Server) -> None:
    service = answering(server, 1)
    server.lose_answers = 1
    started = service.begin(model(2))
    assert state(server) == ("2", True, "1")
    server.lose_answers = 1
    service.roll_back(spec(2))
    server.lose_answers = 1
    service.finish(previous_of(started) or {}, None)
    assert state(server) == ("1", False, "")


def test_a_changed_status_is_no_conflict(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    service, find, touches = answering(server, 1), Service.find, iter([True, True])

    def change_after(self: Service) -> Object | None:
        service = find(self)
        if next(touches, False):
            server.touch()
        return service

    monkeypatch.setattr(Service, "find", change_after)
    assert is_unfinished(service.begin(model(2)))


def test_a_cancelled_run_rolls_back_only_its_own_rollout(server: Server) -> None:
    answering(server, 1).begin(model(2, "run-2"))
    other = Service(server, "window")
    other.begin(model(3, "run-3"))
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
    assert canary_of(service.begin(model(2)))
    started = service.promote(model(2))
    first = copy.deepcopy(service.finish(stable_of(started), previous_of(started)))
    started = service.begin(model(3, "run-3"))
    assert (state(server), tried(server)) == (("2", False, "1"), "3")
    assert started["metadata"]["annotations"] == first["metadata"]["annotations"]
    # KServe takes the canary's pod off these.
    assert started["spec"]["predictor"] == first["spec"]["predictor"] | {"minReplicas": 3}
    assert versions_in_service(server) == {f"{number:012x}" for number in (1, 2, 3)}
    service.begin(model(4, "run-4"))
    with pytest.raises(JobError, match="shop was given another model by run-4 meanwhile"):
        service.promote(model(3, "run-3"))
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
    service.finish(service.begin(model(1, **more))["spec"]["predictor"], None)
    service.begin(model(2))
    assert (state(server), tried(server)) == (("2", True, "1"), "")


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
        Service(server, "shop").begin(model(1))


def test_a_cluster_without_kserve_is_an_error(server: Server) -> None:
    check_kserve(server)
    server.resources = []
    with pytest.raises(InputError, match="install KServe"):
        Service(server, "shop").begin(model(1))
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
    for act in (lambda: service.begin(model(1)), lambda: service.roll_back(spec(1))):
        with pytest.raises(InputError, match="was not made by kfp-ddp and is not changed"):
            act()
    assert json.dumps(server.objects) == unchanged


def test_current_and_previous_versions_are_in_service(server: Server) -> None:
    assert versions_in_service(server) == set()
    service = answering(server, 1)
    for number in (2, 3):
        started = service.begin(model(number))
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


class Knative(Server):
    """KServe with Knative: routes to the newest revision, while pods of others stay."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.revisions: dict[str, Object] = {}
        """The pod of each revision, the newest last."""

    def another(self) -> Api:
        return self

    def close(self) -> None:
        pass

    def pages(self, resource: Resource, query: Any = None) -> Iterator[Object]:
        objects = self.revisions if resource is PODS else self.objects
        yield {"items": list(objects.values()), "metadata": {"resourceVersion": "1"}}

    def lines(self, *_: Any, **__: Any) -> Iterator[bytes]:
        raise ApiError(410, "Gone", "list again")

    def put(self, path: str, body: Object, dry: bool = False) -> Object:
        service = super().put(path, body, dry)
        if dry:
            return service
        predictor = stable_of(service)
        revision = label(predictor, SPEC)
        condition = {"type": "Ready", "status": "True"}
        self.revisions.pop(revision, None)
        self.revisions[revision] = {
            "metadata": {"name": revision, "uid": revision, "labels": predictor["labels"]},
            "status": {"phase": "Running", "conditions": [condition]},
        }
        newest = {"latestCreatedRevision": revision, "latestReadyRevision": revision}
        self.objects[path]["status"] = {
            "conditions": [condition],
            "components": {"predictor": {**newest, "address": {"url": self.url}}},
        }
        return service


def test_with_knative_a_model_replaces_the_other_or_is_rolled_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All steps but KServe itself: a model whose answers are wrong leaves the previous one."""
    monkeypatch.setattr(engine, "WRONG_SECONDS", 0.0)
    sample = Sample(b"{}", _Image(name="images", shape=(1,), data=(0,)), "logits", (1.0,), 0.5)
    wrong = label(model(2), SPEC)

    class Newest(Handler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            value = 9.0 if list(knative.revisions)[-1] == wrong else 1.0
            self.answer(200, {"outputs": [{"name": "logits", "data": [value]}]})

    def roll_out(number: int) -> str:
        settings = Deployment(service="shop", canary_requests=1)
        rolled = engine.Rollout(knative, settings, model(number), sample)
        with rolled.watched.watching():
            return rolled.run("flowers")[0]

    with serving_by(Newest) as url:
        knative = Knative(url)
        assert roll_out(1) == url
        with pytest.raises(JobError, match=f"a wrong result: .*; shop answers with {1:012x} as b"):
            roll_out(2)
        assert state(knative) == ("1", False, "")
        assert roll_out(3) == url
    assert state(knative) == ("3", False, "1")
