"""The service of a release, looked at before anything is trained."""

from typing import Any

import pytest

from kfp_ddp.checks.operators import SERVICE_VERBS, check_service
from kfp_ddp.core.errors import InputError
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.models.serving.rollout import OURS

KSERVE = "/apis/serving.kserve.io/v1beta1"
SHOP = f"{KSERVE}/namespaces/here/inferenceservices/shop"
SERVED = {KSERVE: {"resources": [{"name": "inferenceservices"}]}}
OF_OURS = {"metadata": {"labels": OURS}}


class Cluster(Api):
    """Has these objects by path, and lets the account do so."""

    def __init__(self, objects: dict[str, Object], may: tuple[str, ...] = SERVICE_VERBS) -> None:
        super().__init__(None, "here")
        self.objects, self.may = {"/readyz": {}, **objects}, may

    def call(self, method: str, path: str, body: Any = None, *_: Any, **named: Any) -> Object:
        if method == "POST":
            verb = body["spec"]["resourceAttributes"]["verb"]
            return {"status": {"allowed": verb in self.may}}
        if path not in self.objects:
            raise ApiError(404, "Not Found", f"{path} not found")
        return self.objects[path]


def test_without_a_service_no_cluster_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Api, "connect", pytest.fail)
    assert check_service({"canary_percent": 5}, "") == ""


@pytest.mark.parametrize("there", [{}, {SHOP: OF_OURS}])
def test_one_that_is_there_or_can_be_made_is_fine(
    monkeypatch: pytest.MonkeyPatch, there: dict[str, Object]
) -> None:
    monkeypatch.setattr(Api, "connect", lambda: Cluster({**SERVED, **there}))
    assert check_service({"service": "shop"}, "gs://models/exports") == "shop"


@pytest.mark.parametrize(
    ("destination", "cluster", "said"),
    [
        ("", Cluster(SERVED), "names the service shop, and no destination"),
        ("/work/exports", Cluster(SERVED), "KServe cannot read /work/exports/model: give"),
        ("gs://models", Cluster({}), "has no inferenceservices .* install KServe"),
        (
            "gs://models",
            Cluster(SERVED, SERVICE_VERBS[:-1]),
            "no right to patch",
        ),
        ("gs://models", Cluster({**SERVED, SHOP: {"metadata": {}}}), "was not made by kfp-ddp"),
    ],
)
def test_one_that_cannot_be_rolled_out_on_is_one_line(
    monkeypatch: pytest.MonkeyPatch, destination: str, cluster: Cluster, said: str
) -> None:
    monkeypatch.setattr(Api, "connect", lambda: cluster)
    with pytest.raises(InputError, match=said):
        check_service({"service": "shop"}, destination)
