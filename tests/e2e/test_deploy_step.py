"""The step `deploy` on a real cluster, with KServe itself in Standard mode."""

import contextlib
import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
from kubernetes import client

from kfp_ddp.core.errors import InputError
from kfp_ddp.k8s.api import Api
from kfp_ddp.models.inference_service import OPENVINO, RUNTIMES, TRITON, manifest
from kfp_ddp.rollout.rollout import (
    SERVICES,
    Service,
    canary_of,
    canary_predictor,
    labelled,
    roll_back_run,
    stable_of,
)
from tests.e2e.harness import kserve, rights, workflow
from tests.e2e.harness.deploy_step import NAME, DeployStep, publish, publish_again, serve_models
from tests.e2e.harness.grounds import IMAGE, until
from tests.e2e.harness.kserve import Kserve
from tests.e2e.harness.namespace import namespace
from tests.e2e.harness.running import forget

SEEDS = itertools.count(1)


@pytest.fixture(scope="module")
def models_url(cluster: client.ApiClient) -> Iterator[str]:
    with serve_models(cluster) as url:
        yield url


@pytest.fixture
def controller(cluster: client.ApiClient, models_url: str) -> Iterator[Kserve]:
    workflow.define(cluster)
    environment = {
        "AWS_ENDPOINT_URL_S3": models_url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with namespace(cluster) as bare:
        grounds = dataclasses.replace(bare, environment=environment)
        yield kserve.in_namespace(grounds)


@pytest.fixture
def first(controller: Kserve, models_url: str) -> str:
    """Deploy a first model as the service `shop`; return its version."""
    return deploy(controller, models_url).start().done()["version"]


def deploy(controller: Kserve, url: str, fault: str = "", **release: Any) -> DeployStep:
    """Return a step that rolls out a new bundle, with a fault of the harness's server."""
    return DeployStep(controller.grounds, publish(url, next(SEEDS), fault), "shop", **release)


def shop(controller: Kserve) -> dict[str, Any]:
    actual = controller.service("shop")
    assert actual is not None
    return actual


def predictor(controller: Kserve) -> dict[str, Any]:
    return stable_of(shop(controller))


def assert_rolled_out(controller: Kserve, version: str) -> None:
    """Check that only this version is left of all rollouts."""
    actual = shop(controller)["spec"]
    assert actual["predictor"]["labels"]["kfp-ddp/version"] == version
    assert "canaryTrafficPercent" not in actual["predictor"]
    assert "canary" not in actual
    space = controller.grounds.namespace
    until(lambda: len(controller.apps.list_namespaced_deployment(space).items) == 1, "one", 20)
    until(lambda: len(controller.grounds.core.list_namespaced_service(space).items) == 1, "one")


@pytest.mark.smoke
def test_a_model_is_rolled_out_twice(controller: Kserve, first: str, models_url: str) -> None:
    bundle = publish(models_url, next(SEEDS))
    step = DeployStep(controller.grounds, bundle, "shop").start()
    done = step.done()
    assert bundle.endswith(done["version"])
    assert done["version"] != first
    host = f"shop-predictor.{controller.grounds.namespace}.svc.cluster.local"
    assert done["url"] == f"http://{host}"
    assert "testing http://shop-trial-predictor." in step.log()
    assert_rolled_out(controller, done["version"])

    before = shop(controller)["metadata"]["generation"]
    again = DeployStep(controller.grounds, bundle, "shop").start()
    assert again.done() == done
    assert "already answered, and still does" in again.log()
    assert shop(controller)["metadata"]["generation"] == before


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("wrong", "returns a wrong result: its logits differ from the bundle's by 1, "),
        ("crash", "kserve-container exits repeatedly with exit code 1: the model cannot be"),
    ],
)
def test_rollback(controller: Kserve, first: str, models_url: str, fault: str, text: str) -> None:
    answering = controller.pods("shop-predictor")
    error = deploy(controller, models_url, fault).start().error()
    assert text in error
    assert error.endswith(f"shop answers with {first} as before")
    assert_rolled_out(controller, first)
    assert controller.pods("shop-predictor") == answering


def test_a_terminated_run_rolls_back(controller: Kserve, first: str, models_url: str) -> None:
    step = deploy(controller, models_url, "slow", canary_seconds=2)
    step.start().saw("testing http://shop-trial-")
    step.terminate()
    assert step.wait() == "Failed"
    assert f"the run was terminated; shop answers with {first} as before" in step.log()
    until(lambda: (predictor(controller)["labels"]["kfp-ddp/version"]) == first, "the first")


@pytest.mark.parametrize(
    ("fault", "release", "text"),
    [
        ("unready", {"service_minutes": 0.2}, "InferenceService shop is not ready after 0.2 min"),
        ("", {"service_runtime": "kfp-ddp", "service_image": "No/server:1"}, "invalid reference"),
    ],
)
def test_first_model_that_is_not_ready_is_deleted(
    controller: Kserve, models_url: str, fault: str, release: dict[str, Any], text: str
) -> None:
    error = deploy(controller, models_url, fault, **release).start().error()
    assert text in error
    assert error.endswith("InferenceService shop was deleted, as nothing answered before")
    assert controller.service("shop") is None


def test_canary_without_pods_ends(controller: Kserve, first: str, models_url: str) -> None:
    step = deploy(controller, models_url, service_account="nobody")
    error = step.start().error()
    assert 'serviceaccount "nobody" not found' in error
    assert error.endswith(f"shop answers with {first} as before")
    assert_rolled_out(controller, first)


def test_a_killed_rollout_converges(controller: Kserve, first: str, models_url: str) -> None:
    step = deploy(controller, models_url, canary_requests=300)
    answering = controller.pods("shop-predictor")
    for point in ("shop waits for", "testing http://shop-trial-", "testing http://shop-predictor"):
        step.start().saw(point)
        forget(controller.grounds, step.name)
        assert step.wait() == "Lost"
        now = controller.pods("shop-predictor")
        assert (now == answering) == (point != "testing http://shop-predictor")
    assert_rolled_out(controller, step.start().done()["version"])


@pytest.mark.parametrize("point", ["testing http://shop-trial-", "testing http://shop-predictor"])
def test_the_rollout_of_a_killed_run_is_rolled_back_at_its_end(
    controller: Kserve, first: str, models_url: str, point: str
) -> None:
    step = deploy(controller, models_url, canary_requests=300).start()
    step.saw(point)
    step.signal()
    assert step.wait() == "Failed"
    grounds = controller.grounds
    with rights.act_as(grounds.api, grounds.namespace, grounds.service_account) as account:
        api = Api(account, grounds.namespace)
        assert roll_back_run(api, "another run") == []
        assert roll_back_run(api, step.run_id) == [f"shop answers with {first} as before"]
        assert roll_back_run(api, step.run_id) == []
    assert predictor(controller)["labels"]["kfp-ddp/version"] == first
    assert not canary_of(shop(controller))


def test_another_run_continues_a_rollout(controller: Kserve, first: str, models_url: str) -> None:
    fine = publish(models_url, next(SEEDS))
    earlier = deploy(controller, models_url, "unready").start()
    earlier.saw("shop waits for")
    publish_again(models_url, fine)
    later = DeployStep(controller.grounds, fine, "shop").start()
    assert fine.endswith(later.done()["version"])
    error = earlier.error()
    assert f"InferenceService shop was given another model by {later.run_id} meanwhile" in error
    assert first != fine[-12:]
    assert_rolled_out(controller, fine[-12:])


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["kfp-ddp", TRITON])
def test_a_rollout_loses_no_request(controller: Kserve, models_url: str, runtime: str) -> None:
    """The stand-in for Triton stops at once on SIGTERM: its pods wait before it."""
    release = dict[str, Any](service_runtime=runtime, service_minutes=5, service_cpu="200m")
    if runtime == "kfp-ddp":
        release |= {"service_image": IMAGE, "service_memory": "1Gi"}
    deploy(controller, models_url, **release).start().done()
    with clients(controller, 4) as answers:
        for _ in range(2):
            deploy(controller, models_url, **release).start().done()
            time.sleep(15)  # until the pods that were replaced have stopped
    lost = [answer for answer in answers if answer != "200"]
    print(f"{len(lost)} of {len(answers)} requests were lost")
    assert len(answers) > 100
    assert lost == []


@contextlib.contextmanager
def clients(controller: Kserve, number: int) -> Iterator[list[str]]:
    """Send requests, each on its own connection, until the block ends; yields the answers."""
    actual = controller.grounds.core.read_namespaced_service(
        "shop-predictor", controller.grounds.namespace
    )
    url = f"http://{actual.spec.cluster_ip}/v2/models/{NAME}/infer"
    image = {"name": "images", "datatype": "UINT8", "shape": [1, 3, 2, 2], "data": [1] * 12}
    body, over, answers = json.dumps({"inputs": [image]}), threading.Event(), list[str]()

    def ask() -> None:
        while not over.wait(0.02):
            try:
                sent = requests.post(
                    url, body, headers={"Content-Type": "application/json"}, timeout=10
                )
                answers.append(str(sent.status_code))
            except requests.RequestException as error:
                answers.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_the_number_of_pods_follows_the_load_only_if_asked(controller: Kserve) -> None:
    grounds = controller.grounds
    scaled = client.AutoscalingV2Api(grounds.api)
    service = Service(Api(grounds.api, grounds.namespace), "shop")
    containers = [{**kserve.container(), "env": [{"name": "STORAGE_URI", "value": "s3://a/b"}]}]
    bare = {"containers": containers, "serviceAccountName": kserve.READER, "minReplicas": 2}

    def deployments() -> dict[str, int]:
        actual = controller.apps.list_namespaced_deployment(grounds.namespace).items
        return {item.metadata.name: item.spec.replicas for item in actual}

    def limits() -> list[tuple[int, int]]:
        actual = scaled.list_namespaced_horizontal_pod_autoscaler(grounds.namespace).items
        return [(item.spec.min_replicas, item.spec.max_replicas) for item in actual]

    def comes(seen: Callable[[], Any], expected: Any) -> None:
        until(lambda: seen() == expected, str(expected), 20)

    for version, more, expected in (
        ("1", {}, []),
        ("2", {"maxReplicas": 4}, [(2, 4)]),
        ("3", {}, []),
    ):
        desired = labelled({**bare, **more}, version, "s3://a/b", "run")
        started = service.begin(desired)
        if version != "1":
            comes(deployments, {"shop-predictor": 2, "shop-trial-predictor": 1})
            started = service.promote(desired)
        service.finish(stable_of(started), None)
        comes(limits, expected)
        comes(deployments, {"shop-predictor": 2})


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_kserve_accepts_each_runtime_also_as_canary(controller: Kserve, runtime: str) -> None:
    """A dry run with KServe's webhooks."""
    grounds = controller.grounds
    api = Api(grounds.api, grounds.namespace)
    image = IMAGE if runtime == "kfp-ddp" else ""
    body = manifest("shop", "s3://models/flowers", NAME, runtime, image=image)
    service = Service(api, "shop")
    desired = service.with_pre_stop(
        labelled({**stable_of(body), "minReplicas": 1}, "1", "s3://a", "r")
    )
    answering = {**desired, "minReplicas": 2}
    body["spec"] = {
        "predictor": answering,
        "canary": [{"trafficPercent": 0, "predictor": canary_predictor(desired)}],
    }
    applied = api.apply(SERVICES, body, dryRun="All")
    wait = {"preStop": {"exec": {"command": ["sleep", "10"]}}}
    if runtime in (TRITON, OPENVINO):
        assert stable_of(applied)["model"]["lifecycle"] == wait


def test_invalid_input_fails_with_one_line_error(controller: Kserve, models_url: str) -> None:
    grounds = controller.grounds
    api = Api(grounds.api, grounds.namespace)
    wrong = {"containers": [{"name": "kserve-container", "imagine": "x"}]}
    with pytest.raises(InputError, match=r"cannot patch inferenceservices shop .*imagine"):
        Service(api, "shop").begin(wrong)
    assert controller.service("shop") is None
