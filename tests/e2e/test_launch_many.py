"""A job of many workers, 100 here and 1,000 in the soak, on nodes whose kubelets are stood in for.

Its step's connections, requests and memory do not grow with the job, and its error is right.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client

from kfp_ddp.jobs.follow.logs import STREAMS, sample_note
from kfp_ddp.k8s.api import Api
from tests.e2e.harness import many, scene, stand_in

pytestmark = pytest.mark.smoke

# Streams of logs; watches of the job, its pods and events; the launch itself, and its last request.
SOCKETS = STREAMS + 3 + 2
REQUESTS = 60
"""And one for each second that it takes, at most."""
RSS_MB = 300
MANY = [
    pytest.param(100, 20, 5, id="100"),
    pytest.param(1000, 50, 20, id="1000", marks=pytest.mark.soak),
]


@pytest.fixture
def api(cluster: client.ApiClient) -> Iterator[Api]:
    with scene.namespace(cluster, ours=False) as space:
        result = Api(cluster, space.namespace)
        if why := stand_in.impossible(result):
            pytest.skip(why)
        yield result


@pytest.mark.parametrize(("count", "failing", "replaced"), MANY)
def test_the_first_of_many_failures_is_named_and_little_is_used(
    api: Api, tmp_path: Path, count: int, failing: int, replaced: int
) -> None:
    played = many.play(api, tmp_path, count, failing, replaced)
    lines, logs = played.launch.lines, played.kubelets.logs
    first, nodes = many.number(played.first), count // many.PODS_A_NODE
    assert f"failed: worker-{first}: exit code 1: ValueError: no layer 5; " in lines[-1]
    message = [line for line in lines if line.startswith("following at most")]
    assert message == [sample_note(count, api.namespace)]
    assert f"[worker-0] {played.pods[0]} is at step 0" in lines
    assert f"[worker-{first}] ValueError: no layer 5" in lines
    assert logs.most_open <= STREAMS
    assert len(logs.asked) <= nodes + failing + replaced
    used = played.launch.used
    assert used.sockets <= SOCKETS, used
    assert used.requests <= REQUESTS + used.seconds, used
    assert used.rss_mb <= RSS_MB, used
