"""A job of 100 workers, or of 1,000 in the soak, on nodes of stand-in kubelets.

Connections, requests and memory of the step do not grow with the job.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client

from benchmarks.launch_parts import kubelets, load
from kfp_ddp.jobs.follow.logs import STREAMS, sample_note
from kfp_ddp.k8s.api import Api
from tests.e2e.harness import scene

pytestmark = pytest.mark.smoke

# Streams of logs, three watches (job, pods, events), the launch itself and its last request.
SOCKETS = STREAMS + 3 + 2
REQUESTS = 60
"""Besides at most one a second."""
RSS_MB = 300
MANY = [
    pytest.param(100, 20, 5, id="100"),
    pytest.param(1000, 50, 20, id="1000", marks=pytest.mark.soak),
]


@pytest.fixture
def api(cluster: client.ApiClient) -> Iterator[Api]:
    with scene.namespace(cluster, ours=False) as space:
        result = Api(cluster, space.namespace)
        if why := kubelets.find_obstacle(result):
            pytest.skip(why)
        yield result


@pytest.mark.parametrize(("count", "failing", "replaced"), MANY)
def test_first_of_many_failures_is_named_and_usage_is_bounded(
    api: Api, tmp_path: Path, count: int, failing: int, replaced: int
) -> None:
    job = load.run_job(api, tmp_path, count, failing, replaced)
    lines, logs = job.launch.lines, job.kubelets.logs
    first, nodes = load.number(job.first), count // load.PODS_A_NODE
    assert f"failed: worker-{first}: exit code 1: ValueError: no layer 5; " in lines[-1]
    notes = [line for line in lines if line.startswith("following at most")]
    assert notes == [sample_note(count, api.namespace)]
    assert f"[worker-0] {job.pods[0]} is at step 0" in lines
    assert f"[worker-{first}] ValueError: no layer 5" in lines
    assert logs.most_open <= STREAMS
    assert len(logs.requested) <= nodes + failing + replaced
    usage = job.launch.usage
    assert usage.sockets <= SOCKETS, usage
    assert usage.requests <= REQUESTS + usage.seconds, usage
    assert usage.rss_mb <= RSS_MB, usage
