"""The network between pods is measured, and the one whose link is slow is named."""

import json
import subprocess
from typing import Any

import pytest
from kubernetes import client

from kfp_ddp.core.errors import JobError
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.netcheck import require
from kfp_ddp.k8s.api import Api
from tests.e2e.harness.grounds import IMAGE, Grounds
from tests.e2e.harness.namespace import namespace
from tests.e2e.harness.programs import kfp_ddp

SMALL = {"cpu": "2", "cpu_request": "50m", "memory": "2Gi", "run_as_user": 1000}
MBIT = 40


def test_a_healthy_network_and_one_with_a_slow_node(cluster: client.ApiClient) -> None:
    with namespace(cluster) as ground:
        code, result = _netcheck(ground, nodes=2)
        assert (code, result["problems"]) == (0, []), result
        assert len(result["nodes"]) == 2
        assert {node["interface"] for node in result["nodes"]} == {"eth0"}
        usual = min(rate for row in result["rates"] for rate in row if rate)
        assert usual > 10 * MBIT / 1000
        # A pod's containers share its network, so one that begins it can hold it back.
        slow = "case $HOSTNAME in *worker-0*) /usr/sbin/tc qdisc add dev eth0 root tbf "
        slow += f"rate {MBIT}mbit burst 32kbit latency 400ms ;; esac"
        begins = {
            "name": "slow",
            "command": ["sh", "-c", slow],
            "securityContext": {
                "runAsUser": 0,
                "runAsNonRoot": False,
                "capabilities": {"add": ["NET_ADMIN"]},
            },
        }
        code, result = _netcheck(ground, nodes=3, init_containers=[begins])
        assert code == 1, result
        assert len(result["problems"]) == 1
        assert "-worker-0) sends 0.0" in result["problems"][0]
        api = Api(ground.api, ground.namespace)
        assert _active_jobs(api) == []


def test_a_job_that_cannot_start_leaves_nothing(cluster: client.ApiClient) -> None:
    with namespace(cluster) as ground:
        done = _program(ground, "--job", "pending_minutes=0.2", "--job", "cpu=1000")
        assert done.returncode == 1
        assert "did not start within pending_minutes" in done.stderr
        assert _active_jobs(Api(ground.api, ground.namespace)) == []


def _netcheck(ground: Grounds, nodes: int, **job: Any) -> tuple[int, dict[str, Any]]:
    parameters = {name: json.dumps(value) for name, value in job.items()}
    words = [f"{name}={value}" for name, value in {**SMALL, **parameters}.items()]
    options = [word for pair in words for word in ("--job", pair)]
    done = _program(ground, "--nodes", str(nodes), "--largest-mb", "8", "--json", *options)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def _program(ground: Grounds, *words: str) -> "subprocess.CompletedProcess[str]":
    return kfp_ddp("netcheck", "-n", ground.namespace, "--image", IMAGE, *words)


def _active_jobs(api: Api) -> list[str]:
    items = api.list_objects(KINDS["pytorchjob"].resource)
    over = ("Succeeded", "Failed")
    return [
        job["metadata"]["name"]
        for job in items
        if not any(
            condition["type"] in over for condition in job.get("status", {}).get("conditions", [])
        )
    ]


def test_no_training_starts_on_a_slow_network(cluster: client.ApiClient) -> None:
    with namespace(cluster) as ground:
        api = Api(ground.api, ground.namespace)
        pods = {**SMALL, "kind": "pytorchjob", "image": IMAGE, "nodes": 2, "retries": 3}
        with pytest.raises(JobError, match=r"less than the minimum of 100000") as error:
            require(100_000.0, pods, ("run", "train", ""), api)
        assert "\n" not in str(error.value)
        assert api.list_objects(KINDS["pytorchjob"].resource) == []
