"""Jobs of other frameworks than torch: RayJobs of KubeRay, and TensorFlow in a TFJob."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import pytest
from kubernetes import client

from tests.conftest import CHECKOUT
from tests.e2e.harness import workflow
from tests.e2e.harness.bucket import serving_index
from tests.e2e.harness.grounds import Grounds, claim, until
from tests.e2e.harness.launch_step import LaunchStep
from tests.e2e.harness.namespace import namespace

rays = pytest.mark.parametrize("kind", ["rayjob"])
MINUTES = 600.0
PACKAGE, TENSORFLOW = "tensorflow-cpu==2.21.0", CHECKOUT / "build" / "tensorflow"
# Ray gives its processes seconds to start, too few on a crowded machine.
PATIENCE = {
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300",
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_worker_register_timeout_seconds": "240",
}
WORDS = "a b $(HOME) 'q"
SCRIPT = """
import os, sys, time, ray

@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
def place():
    time.sleep(3)
    return os.uname().nodename

ray.init()
hosts = ray.get([place.remote() for _ in range(2)])
print("SAID", len(set(hosts)), sys.argv[1:], flush=True)
for number in range(60):
    print("line", number, flush=True)
    time.sleep(0.5)
raise ValueError("no such layer")
"""


MIRRORED = """
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    weight = tf.Variable(0.0)


@tf.function
def step(inputs):
    def replica(inputs):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((weight * inputs - 3.0 * inputs) ** 2)
        gradient = tape.gradient(loss, weight)
        gradient = tf.distribute.get_replica_context().all_reduce("mean", gradient)
        weight.assign_sub(0.2 * gradient)

    strategy.run(replica, args=(inputs,))


place = strategy.cluster_resolver
for _ in range(30):  # of 1 in the chief and of 2 in the worker: without an exchange, 2 diverges
    step(tf.constant([2.0 if place.task_type == "worker" else 1.0]))
print("SAID", place.task_type, strategy.num_replicas_in_sync, f"{weight.numpy():.4f}", flush=True)
"""


@pytest.fixture(scope="module")
def grounds(cluster: client.ApiClient) -> Iterator[Grounds]:
    workflow.define(cluster)
    with namespace(cluster) as space:
        claim(space, "work")
        yield space


def launching(grounds: Grounds, kind: str, **fields: Any) -> LaunchStep:
    if find_spec("ray") is None:
        pytest.skip("no Ray in this environment, which the pods share")
    small = {"memory": "2Gi", "memory_request": "256Mi", "shm_size": "96Mi", "env": PATIENCE}
    spec = {"kind": kind, "script": SCRIPT, **small, **fields}
    return LaunchStep(grounds, spec, work_claim="work").start(MINUTES)


@pytest.mark.smoke
@rays
def test_a_killed_step_adopts_its_rayjob_and_names_the_cause(grounds: Grounds, kind: str) -> None:
    step = launching(grounds, kind, nodes=2, args=[WORDS])
    step.saw("line 3", MINUTES)
    step.freeze()
    step.kill()
    assert step.wait() == "Lost"
    assert step.start(MINUTES).wait(MINUTES) == "Failed", step.log()
    log = step.log().splitlines()
    texts = [line.partition("] ")[2] for line in log if line.startswith("[submitter-0] ")]
    assert f"SAID 2 {[WORDS]}" in texts
    assert {f"line {number}" for number in range(60)} <= set(texts)
    assert "failed: submitter-0: exit code 1: ValueError: no such layer" in step.log()
    (job,) = step.jobs(kind)
    assert (job["status"]["jobStatus"], job["status"]["reason"]) == ("FAILED", "AppFailed")
    until(lambda: len(step.workers()) == 1, "the removal of the cluster", 120)


@rays
def test_a_cancelled_run_deletes_its_rayjob(grounds: Grounds, kind: str) -> None:
    step = launching(grounds, kind)
    step.saw("[head-0]", MINUTES)
    step.terminate()
    until(lambda: step.jobs(kind) == [], "the job's deletion", 60)
    assert step.wait() == "Failed"
    assert "error: the run was terminated; RayJob" in step.log()
    until(lambda: step.workers() == [], "the pods' end", 120)


def test_tensorflow_mirrors_its_variables_in_a_tfjob(
    cluster: client.ApiClient, grounds: Grounds
) -> None:
    if not TENSORFLOW.exists():
        pytest.skip(f"no {TENSORFLOW}: python -m tests.package_index build/tensorflow {PACKAGE}")
    with serving_index(cluster, TENSORFLOW) as url:
        packages = {"packages_to_install": [PACKAGE], "pip_index_urls": [url]}
        trusted = {"PIP_TRUSTED_HOST": str(urlsplit(url).hostname)}
        fields = {"kind": "tfjob", "nodes": 2, "script": MIRRORED, "memory": "4Gi", "env": trusted}
        step = LaunchStep(grounds, fields | packages).start(2 * MINUTES)
        assert step.wait(2 * MINUTES) == "Succeeded", step.log()
    lines = {line.partition("] ")[2] for line in step.log().splitlines() if "SAID" in line}
    assert lines == {f"SAID {role} 2 3.0000" for role in ("chief", "worker")}
