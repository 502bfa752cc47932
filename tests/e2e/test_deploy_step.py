"""The step `deploy` on a real cluster: KServe's definition, a stand-in for its controller."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from kfp_ddp.core.errors import InputError
from kfp_ddp.k8s.api import Api
from kfp_ddp.models.serving.rollout import Service, take_back_of
from tests.e2e.harness import kserve, rights, workflow
from tests.e2e.harness.deploy_step import DeployStep, publish
from tests.e2e.harness.grounds import Grounds, until
from tests.e2e.harness.kserve import Controller
from tests.e2e.harness.scene import namespace

SEEDS = itertools.count(1)
KNATIVE, STANDARD = "Knative", "Standard"
BOTH = pytest.mark.parametrize("controller", [KNATIVE, STANDARD], indirect=True)
IN_STANDARD = pytest.mark.parametrize("controller", [STANDARD], indirect=True)
IN_KNATIVE = pytest.mark.parametrize("controller", [KNATIVE], indirect=True)


@pytest.fixture
def grounds(cluster: client.ApiClient, bucket_url: str) -> Iterator[Grounds]:
    workflow.define(cluster)
    kserve.define(cluster)
    with namespace(cluster) as bare:
        yield dataclasses.replace(bare, environment={"STORAGE_EMULATOR_HOST": bucket_url})


@pytest.fixture
def controller(grounds: Grounds, request: pytest.FixtureRequest) -> Iterator[Controller]:
    with Controller(grounds, request.param).running() as running:
        yield running


@pytest.fixture
def first(controller: Controller, bucket_url: str) -> str:
    """Deploy a first model as the service `shop`; return its version."""
    return (
        DeployStep(controller.grounds, publish(bucket_url, next(SEEDS)), "shop")
        .start()
        .done()["version"]
    )


def faulty(controller: Controller, url: str, fault: str, **release: Any) -> DeployStep:
    """Return a step that rolls out a bundle with a fault of `Controller`."""
    bundle = publish(url, next(SEEDS))
    controller.faults[bundle] = fault
    return DeployStep(controller.grounds, bundle, "shop", **release)


def shop(controller: Controller) -> dict[str, Any]:
    found = controller.service("shop")
    assert found is not None
    return found


def predictor(controller: Controller) -> dict[str, Any]:
    found: dict[str, Any] = shop(controller)["spec"]["predictor"]
    return found


@pytest.mark.smoke
@BOTH
def test_a_model_is_rolled_out_and_replaced_by_the_next(
    controller: Controller, first: str, bucket_url: str
) -> None:
    bundle = publish(bucket_url, next(SEEDS))
    step = DeployStep(controller.grounds, bundle, "shop").start()
    done = step.done()
    assert bundle.endswith(done["version"])
    assert done["version"] != first
    host = f"shop-predictor.{controller.grounds.namespace}.svc.cluster.local"
    assert done["url"] == f"http://{host}"
    assert ("testing http://latest-" in step.log()) == (controller.mode == KNATIVE)
    assert predictor(controller)["labels"]["kfp-ddp/version"] == done["version"]
    assert "canaryTrafficPercent" not in predictor(controller)
    if controller.mode == KNATIVE:
        assert len(traffic(controller)) == 1

    before = shop(controller)["metadata"]["generation"]
    again = DeployStep(controller.grounds, bundle, "shop").start()
    assert again.done() == done
    assert "already answered, and still does" in again.log()
    assert shop(controller)["metadata"]["generation"] == before


def traffic(controller: Controller) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = shop(controller)["status"]["components"]["predictor"]["traffic"]
    return found


@BOTH
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("wrong", "answers wrongly: its logits differ from the bundle's by 1, "),
        ("crash", "kserve-container exits repeatedly with exit code 1: the model cannot be"),
    ],
)
def test_a_failed_model_is_rolled_back(
    controller: Controller, first: str, bucket_url: str, fault: str, text: str
) -> None:
    error = faulty(controller, bucket_url, fault).start().error()
    assert text in error
    assert error.endswith(f"shop answers with {first} as before")
    now = predictor(controller)
    assert (now["labels"]["kfp-ddp/version"], "canaryTrafficPercent" in now) == (first, False)
    fine = publish(bucket_url, next(SEEDS))
    assert fine.endswith(DeployStep(controller.grounds, fine, "shop").start().done()["version"])


@IN_KNATIVE
def test_a_model_on_trial_gets_its_share_of_requests(
    controller: Controller, first: str, bucket_url: str
) -> None:
    step = faulty(controller, bucket_url, "slow", canary_percent=7, canary_seconds=2)
    step.start().saw("testing http://latest-shop")
    assert {(each["tag"], each["percent"]) for each in traffic(controller)} == {
        ("latest", 7),
        ("prev", 93),
    }
    step.terminate()
    assert step.wait() == "Failed"
    assert f"the run was terminated; shop answers with {first} as before" in step.log()
    until(lambda: (predictor(controller)["labels"]["kfp-ddp/version"]) == first, "the first")


@IN_STANDARD
def test_a_first_model_that_does_not_become_ready_is_deleted(
    controller: Controller, bucket_url: str
) -> None:
    error = faulty(controller, bucket_url, "unready", service_minutes=0.2).start().error()
    assert error.startswith("InferenceService shop is not ready after 0.2 minutes, it waits for ")
    assert error.endswith("InferenceService shop was deleted, as nothing answered before")
    assert controller.service("shop") is None


@IN_STANDARD
def test_an_invalid_image_ends_the_wait_early(controller: Controller, bucket_url: str) -> None:
    error = faulty(controller, bucket_url, "image", service_minutes=30).start().error()
    assert "cannot pull Nowhere/server:1.0 (" in error
    assert "invalid reference format" in error
    assert controller.service("shop") is None


@IN_STANDARD
def test_a_repeated_step_resumes_the_rollout(
    controller: Controller, first: str, bucket_url: str
) -> None:
    step = faulty(controller, bucket_url, "slow").start()
    step.saw("testing http://shop")
    step.evict()
    assert step.wait() == "Lost"
    assert predictor(controller)["canaryTrafficPercent"] == 10
    controller.faults[step.bundle] = "wrong"
    error = step.start().error()
    assert error.endswith(f"shop answers with {first} as before")


@IN_STANDARD
def test_the_rollout_of_a_killed_run_is_rolled_back_at_its_end(
    controller: Controller, first: str, bucket_url: str
) -> None:
    step = faulty(controller, bucket_url, "slow").start()
    step.saw("testing http://shop")
    step.signal()
    assert step.wait() == "Failed"
    grounds = controller.grounds
    with rights.acting(grounds.api, grounds.namespace, grounds.service_account) as account:
        api = Api(account, grounds.namespace)
        assert take_back_of(api, "another run") == []
        assert take_back_of(api, step.run_id) == [f"shop answers with {first} as before"]
        assert take_back_of(api, step.run_id) == []
    assert predictor(controller)["labels"]["kfp-ddp/version"] == first


@IN_STANDARD
def test_another_run_takes_a_rollout_over(
    controller: Controller, first: str, bucket_url: str
) -> None:
    slow, fine = publish(bucket_url, next(SEEDS)), publish(bucket_url, next(SEEDS))
    controller.faults[slow] = "unready"
    publish_again(bucket_url, slow)
    earlier = DeployStep(controller.grounds, slow, "shop").start()
    earlier.saw("shop waits for")
    publish_again(bucket_url, fine)
    later = DeployStep(controller.grounds, fine, "shop").start()
    assert fine.endswith(later.done()["version"])
    error = earlier.error()
    assert f"InferenceService shop was given another model by {later.run_id} meanwhile" in error
    assert predictor(controller)["labels"]["kfp-ddp/version"] == fine[-12:]


def publish_again(url: str, bundle: str) -> None:
    """Make an existing bundle the champion."""
    from tests.e2e.harness import bucket

    name = f"exports/{bundle.split('/')[-2]}/CHAMPION"
    bucket.upload(url, bucket.MODELS, name, f"{bundle[-12:]}\n".encode())


@pytest.mark.smoke
@IN_STANDARD
def test_invalid_input_fails_with_one_line_error(controller: Controller, bucket_url: str) -> None:
    grounds = controller.grounds
    bare = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": "theirs"},
        "spec": {"predictor": {"model": {"modelFormat": {"name": "onnx"}}}},
    }
    group, version, plural = kserve.GROUP, kserve.VERSION, kserve.PLURAL
    made = grounds.custom.create_namespaced_custom_object(
        group, version, grounds.namespace, plural, bare
    )
    api = Api(grounds.api, grounds.namespace)
    with pytest.raises(InputError, match="was not made by kfp-ddp and is left alone"):
        Service(api, "theirs").find()
    found = controller.service("theirs")
    assert found is not None
    assert found["spec"] == made["spec"]
    with (
        rights.acting(grounds.api, grounds.namespace, "default") as nobody,
        pytest.raises(InputError, match=r"no right to get inferenceservices .* apply deploy/rbac"),
    ):
        Service(Api(nobody, grounds.namespace), "shop").find()
    wrong = {"containers": [{"name": "kserve-container", "imagine": "x"}]}
    with pytest.raises(InputError, match=r"the cluster refused InferenceService shop: .*imagine"):
        Service(api, "shop").begin(wrong, 10)
    assert controller.service("shop") is None


@IN_STANDARD
def test_only_the_champion_is_rolled_out(controller: Controller, bucket_url: str) -> None:
    old = publish(bucket_url, next(SEEDS))
    new = publish(bucket_url, next(SEEDS))
    step = DeployStep(controller.grounds, old, "shop").start()
    assert step.done() == {"url": "", "version": ""}
    assert f"{old} is not rolled out: {new[-12:]} is the champion now" in step.log()
    assert controller.service("shop") is None
