"""The check of the service of a release."""

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
    """A cluster with these objects by path, whose account has the rights `may`."""

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


def test_without_a_service_the_cluster_is_not_accessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Api, "connect", pytest.fail)
    assert check_service({"canary_percent": 5}, "") == ""


@pytest.mark.parametrize("existing", [{}, {SHOP: OF_OURS}])
def test_service_that_exists_or_can_be_created_is_valid(
    monkeypatch: pytest.MonkeyPatch, existing: dict[str, Object]
) -> None:
    monkeypatch.setattr(Api, "connect", lambda: Cluster({**SERVED, **existing}))
    assert check_service({"service": "shop"}, "gs://models/exports") == "shop"


@pytest.mark.parametrize(
    ("destination", "cluster", "reason"),
    [
        ("", Cluster(SERVED), "names the service shop, and no destination"),
        ("/work/exports", Cluster(SERVED), "KServe cannot read /work/exports/model: give"),
        ("gs://models", Cluster({}), "has no inferenceservices .* install KServe"),
        ("gs://models", Cluster(SERVED, SERVICE_VERBS[:-1]), "no right to patch"),
        ("gs://models", Cluster({**SERVED, SHOP: {"metadata": {}}}), "was not made by kfp-ddp"),
    ],
)
def test_service_that_cannot_be_used_is_an_error(
    monkeypatch: pytest.MonkeyPatch, destination: str, cluster: Cluster, reason: str
) -> None:
    monkeypatch.setattr(Api, "connect", lambda: cluster)
    with pytest.raises(InputError, match=reason):
        check_service({"service": "shop"}, destination)
