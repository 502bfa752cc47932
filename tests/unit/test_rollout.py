"""A rollout against an API server in memory, in every order in which runs may meet."""

import copy
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.models.serving import rollout
from kfp_ddp.models.serving.rollout import (
    Service,
    before,
    in_service,
    label,
    on_trial,
    predictor_of,
    served,
    signed,
    take_back_of,
)

GROUP = "/apis/serving.kserve.io/v1beta1"
LIST = f"{GROUP}/namespaces/here/inferenceservices"
SHOP = f"{LIST}/shop"


class Server(Api):
    """InferenceServices in memory, changed only against the version that was read."""

    def __init__(self) -> None:
        super().__init__(None, "here")
        self.objects: dict[str, Object] = {}
        self.versions = itertools.count(1)
        self.lose_answers = 0
        """How many changes are made whose answer does not come."""
        self.refuse: dict[str, int] = {}
        self.resources = [{"name": "inferenceservices"}]

    def ready(self) -> bool:
        return True

    def call(self, method: str, path: str, body: Any = None, *more: Any, **named: Any) -> Object:
        if method in self.refuse:
            raise ApiError(self.refuse[method], "No", f"somebody cannot {method} that")
        if path == GROUP:
            return {"resources": self.resources}
        if path == LIST:
            return {"items": list(self.objects.values())}
        if method == "APPLY":
            return self.put(path, body)
        if path not in self.objects:
            raise ApiError(404, "Not Found", f"{path} not found")
        if method == "DELETE":
            uid = self.objects[path]["metadata"]["uid"]
            assert body["preconditions"]["uid"] == uid
            return self.objects.pop(path)
        return copy.deepcopy(self.objects[path])

    def put(self, path: str, body: Object) -> Object:
        there = self.objects.get(path)
        seen = body["metadata"].get("resourceVersion")
        if there and seen != there["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "it was changed")
        made: Object = copy.deepcopy(body)
        version = str(next(self.versions))
        made["metadata"] |= {"resourceVersion": version, "uid": "1"}
        self.objects[path] = made
        if self.lose_answers:
            self.lose_answers -= 1
            raise ApiError(0, "", "no answer")
        return copy.deepcopy(made)

    def touch(self, path: str = SHOP) -> None:
        """What a controller does: the status, and so the version, is another one."""
        self.objects[path]["metadata"]["resourceVersion"] = str(next(self.versions))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(rollout, "_PAUSE", 0.0)
    return Server()


def model(number: int, run: str = "run-1") -> Object:
    version = f"{number:012x}"
    uri = f"gs://models/{version}"
    return signed({"model": {"storageUri": uri}, "minReplicas": 1}, version, uri, run)


def spec(number: int) -> str:
    return label(model(number), rollout.SPEC)


def answering(server: Server, number: int) -> Service:
    """A service that answers with this model alone."""
    service = Service(server, "shop")
    there = service.begin(model(number), 10)
    service.settle(predictor_of(there), before(there))
    return service


def now(server: Server) -> tuple[str, int | None, str]:
    """The version of the service, its share, and the version that it remembers."""
    there = server.objects[SHOP]
    remembered = before(there) or {}
    predictor = predictor_of(there)
    share = predictor.get(rollout.PERCENT)
    return label(predictor, rollout.VERSION)[-1:], share, label(remembered, rollout.VERSION)[-1:]


def test_a_first_model_is_on_trial_and_then_is_all(server: Server) -> None:
    service = Service(server, "shop")
    there = service.begin(model(1), 10)
    assert (now(server), on_trial(there)) == (("1", 10, ""), True)
    service.settle(predictor_of(there), before(there))
    assert now(server) == ("1", None, "")
    assert server.objects[SHOP]["metadata"]["labels"] == rollout.OURS


def test_the_next_remembers_it_also_when_promoted(server: Server) -> None:
    """The annotation is part of KServe's template: without it the pods would be made anew."""
    service = answering(server, 1)
    there = service.begin(model(2), 10)
    assert now(server) == ("2", 10, "1")
    annotations = copy.deepcopy(server.objects[SHOP]["metadata"]["annotations"])
    service.settle(predictor_of(there), before(there))
    assert now(server) == ("2", None, "1")
    assert server.objects[SHOP]["metadata"]["annotations"] == annotations


def test_what_answers_already_is_not_touched(server: Server) -> None:
    service = answering(server, 1)
    version = server.objects[SHOP]["metadata"]["resourceVersion"]
    assert not on_trial(service.begin(model(1, "run-2"), 10))
    assert server.objects[SHOP]["metadata"]["resourceVersion"] == version


def test_other_resources_are_another_predictor(server: Server) -> None:
    service = answering(server, 1)
    more = {"model": {"storageUri": "gs://models/1"}, "minReplicas": 2}
    assert on_trial(service.begin(signed(more, f"{1:012x}", "gs://models/1", "run-2"), 10))


def test_the_step_run_again_remembers_the_same(server: Server) -> None:
    service = answering(server, 1)
    for _ in range(3):
        assert on_trial(service.begin(model(2), 10))
        assert now(server) == ("2", 10, "1")


def test_who_succeeds_an_unfinished_rollout_goes_back_to_what_was_before_both(
    server: Server,
) -> None:
    service = answering(server, 1)
    service.begin(model(2, "run-2"), 10)
    service.begin(model(3, "run-3"), 20)
    assert now(server) == ("3", 20, "1")
    with pytest.raises(JobError, match="shop was given another model by run-3 meanwhile"):
        service.settle(model(2), None)
    with pytest.raises(JobError, match="shop was given another model by run-3 meanwhile"):
        service.take_back(spec(2))
    assert service.take_back(spec(3)) == f"shop answers with {1:012x} as before"
    assert now(server) == ("1", 0, "")


def test_what_was_taken_back_is_over_and_gives_way_to_the_next(server: Server) -> None:
    service = answering(server, 1)
    service.begin(model(2), 10)
    service.take_back(spec(2))
    assert not on_trial(server.objects[SHOP])
    service.begin(model(3), 10)
    assert now(server) == ("3", 10, "1")
    assert rollout.PERCENT not in (before(server.objects[SHOP]) or {})


def test_a_first_model_that_is_taken_back_leaves_nothing(server: Server) -> None:
    service = Service(server, "shop")
    service.begin(model(1), 10)
    said = service.take_back(spec(1))
    assert said == "InferenceService shop was deleted, as nothing answered before"
    assert server.objects == {}
    assert service.take_back(spec(1)) == "there is no service any more"


def test_a_first_model_of_another_run_is_not_deleted(server: Server) -> None:
    service = Service(server, "shop")
    service.begin(model(1), 10)
    service.begin(model(2, "run-2"), 10)
    with pytest.raises(JobError, match="shop was given another model by run-2 meanwhile"):
        service.take_back(spec(1))
    assert now(server) == ("2", 10, "")


def test_a_lost_answer_is_asked_for_again(server: Server) -> None:
    service = answering(server, 1)
    server.lose_answers = 1
    there = service.begin(model(2), 10)
    assert now(server) == ("2", 10, "1")
    server.lose_answers = 1
    assert service.take_back(spec(2)) == f"shop answers with {1:012x} as before"
    server.lose_answers = 1
    service.settle(before(there) or {}, None)
    assert now(server) == ("1", None, "")


def test_a_change_of_the_controller_meanwhile_is_no_conflict(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, find, touches = answering(server, 1), Service.find, iter([True, True])

    def found_then_changed(self: Service) -> Object | None:
        found = find(self)
        if next(touches, False):
            server.touch()
        return found

    monkeypatch.setattr(Service, "find", found_then_changed)
    assert on_trial(service.begin(model(2), 10))


def test_a_cancelled_run_takes_back_its_own_only(server: Server) -> None:
    answering(server, 1).begin(model(2, "run-2"), 10)
    other = Service(server, "window")
    other.begin(model(3, "run-3"), 10)
    assert take_back_of(server, "run-1") == []
    assert take_back_of(server, "run-2") == [f"shop answers with {1:012x} as before"]
    assert take_back_of(server, "run-2") == []
    assert on_trial(server.objects[other.path])


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (
            {"APPLY": 403},
            "no right to patch inferenceservices in namespace here; apply deploy",
        ),
        ({"GET": 403}, "no right to get inferenceservices in namespace here; apply deploy"),
        ({"APPLY": 422}, "the cluster refused InferenceService shop: somebody cannot APPLY that"),
    ],
)
def test_a_refusal_is_one_line(server: Server, refused: dict[str, int], said: str) -> None:
    server.refuse = refused
    with pytest.raises(InputError, match=said):
        Service(server, "shop").begin(model(1), 10)


def test_a_field_that_is_not_known_is_refused_at_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server answers 500 for it, with which other requests are asked again."""
    said = "failed to create typed patch object (/shop): .spec.predictor.imagine: not declared"

    def refuse(*_: Any) -> Object:
        raise ApiError(500, "Internal Server Error", said)

    monkeypatch.setattr(server, "put", refuse)
    with pytest.raises(InputError, match=r"the cluster refused InferenceService shop: .*imagine"):
        Service(server, "shop").begin(model(1), 10)


def test_a_cluster_without_kserve_is_one_line(server: Server) -> None:
    served(server)
    server.resources = []
    with pytest.raises(InputError, match=r"has no inferenceservices .* install KServe"):
        Service(server, "shop").begin(model(1), 10)
    assert server.objects == {}
    server.refuse = {"GET": 404}
    assert take_back_of(server, "run-1") == []
    with pytest.raises(InputError, match="install KServe"):
        served(server)


def test_a_service_of_others_is_left_alone(server: Server) -> None:
    theirs: Object = {"metadata": {"name": "shop", "uid": "2", "resourceVersion": "0"}}
    server.objects[SHOP] = theirs | {"spec": {"predictor": {"containers": []}}}
    left = json.dumps(server.objects)
    service = Service(server, "shop")
    acts: tuple[Callable[[], Any], ...] = (
        lambda: service.begin(model(1), 10),
        lambda: service.take_back(spec(1)),
    )
    for act in acts:
        with pytest.raises(InputError, match="was not made by kfp-ddp and is left alone"):
            act()
    assert json.dumps(server.objects) == left


def test_what_answers_and_what_it_would_go_back_to_is_in_service(server: Server) -> None:
    assert in_service(server) == set()
    service = answering(server, 1)
    for number in (2, 3):  # which do not answer rightly
        there = service.begin(model(number), 10)
        assert in_service(server) == {f"{1:012x}", f"{number:012x}"}
        service.take_back(label(predictor_of(there), rollout.SPEC))
        assert f"{1:012x}" in in_service(server)
    server.refuse = {"GET": 404}
    assert in_service(server) == set(), "there is no KServe"
    server.refuse = {"GET": 403}
    with pytest.raises(JobError, match="cannot list inferenceservices"):
        in_service(server)
