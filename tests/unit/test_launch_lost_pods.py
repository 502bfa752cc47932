"""A pod that was removed while it ran tells nothing, and its job is tried again all the same."""

import threading
from typing import Any

from kubernetes import client

from kfp_ddp.components.shared.cluster.api import Api
from kfp_ddp.components.shared.launch.ending import Ending
from kfp_ddp.components.shared.launch.follow.failure import root_cause
from kfp_ddp.components.shared.launch.follow.follower import Follower, Limits
from kfp_ddp.components.shared.launch.follow.logs import Place, Stamp
from kfp_ddp.components.shared.launch.manifests.kinds import KINDS, State


def pod(name: str, code: int | None = None, message: str = "") -> dict[str, Any]:
    """A pod, running or ended with an exit code."""
    ended = {"exitCode": code, "message": message, "finishedAt": "2026-01-01T00:00:00Z"}
    state = {"running": {}} if code is None else {"terminated": ended}
    return {
        "metadata": {"name": f"train-0-{name}", "uid": name, "labels": {}},
        "status": {"phase": "Running", "containerStatuses": [{"name": "pytorch", "state": state}]},
    }


def test_a_lost_pod_alone_is_the_cause() -> None:
    failure = root_cause([pod("master-0")], "1 Worker replica(s) failed.", lost=[pod("worker-0")])
    assert failure.retryable
    assert failure.line.endswith("its pod was removed while it ran")


def test_a_lost_pod_explains_a_closed_connection() -> None:
    peer = pod("master-0", 1, "RuntimeError: Connection closed by peer [10.0.0.2]:4711")
    failure = root_cause([peer], "", lost=[pod("worker-0")])
    assert failure.retryable
    assert failure.line.endswith("its pod was removed while it ran")


def test_a_lost_pod_hides_no_error_of_the_user() -> None:
    failure = root_cause([pod("master-0", 2, "ValueError: no")], "", lost=[pod("worker-0")])
    assert not failure.retryable
    assert "ValueError: no" in failure.line


def test_a_pod_that_failed_and_was_cleaned_up_still_tells_why() -> None:
    """The last state of a pod comes with the event of its deletion, and is all there is of it."""
    follower = following()
    running, peer = pod("worker-0"), pod("master-0")
    follower.pods.objects = {"worker-0": running, "master-0": peer}
    follower._notice_lost()
    failed = pod("worker-0", 2, "ValueError: no")
    failed["status"]["phase"] = "Failed"
    follower.pods.removed = {"worker-0": failed}
    follower.pods.objects = {"master-0": peer}
    follower._notice_lost()

    assert follower.lost == []
    assert follower._removed() == [failed]
    assert "ValueError: no" in root_cause([peer, *follower._removed()], "").line


def test_a_pod_whose_place_was_taken_is_no_part_of_the_end() -> None:
    follower = following()
    failed = pod("worker-0", 143, "stopped")
    failed["status"]["phase"] = "Failed"
    follower.pods.objects = {"worker-0": failed}
    follower._notice_lost()
    successor = pod("worker-0")
    successor["metadata"]["uid"] = "another"
    follower.pods.objects = {"another": successor}
    follower._notice_lost()

    assert follower._removed() == []


def test_a_job_whose_lost_pod_was_replaced_is_over_after_a_while() -> None:
    follower = following()
    follower.pods.objects = {"worker-0": pod("worker-0"), "master-0": pod("master-0")}
    follower._notice_lost()
    successor = pod("worker-0")
    successor["metadata"]["uid"] = "another"
    follower.pods.objects = {"another": successor, "master-0": pod("master-0")}
    follower._notice_lost()

    assert not follower._apart(Limits())
    assert not follower._apart(Limits(apart=60))
    follower.parted -= 61
    assert follower._apart(Limits(apart=60))
    follower.printer.line("another/pytorch", Place(0, Stamp(0, 0), 1), "[worker-0] epoch 1")
    assert not follower._apart(Limits(apart=60))


def test_pods_that_a_queue_took_back_are_no_failure() -> None:
    """Neither lost nor replaced, and nothing that was lost before counts once it is let in."""
    follower = following()
    follower.pods.objects = {"worker-0": pod("worker-0"), "master-0": pod("master-0")}
    follower._notice_lost()
    follower._notice_taken(State("queued"))
    follower.pods.objects = {"worker-0": pod("worker-0", 143)}
    follower._notice_lost()
    assert follower._own_pods() == []
    assert follower._only_taken()
    successor = pod("master-0")
    successor["metadata"]["uid"] = "another"
    follower.pods.objects = {"another": successor}
    follower._notice_lost()

    assert follower.lost == []
    assert follower.over == []
    assert not follower._only_taken()
    assert not follower._apart(Limits(apart=60))
    assert follower.parted == 0


def test_a_pod_lost_before_the_queue_took_the_job_back_is_forgotten() -> None:
    follower = following()
    follower.pods.objects = {"worker-0": pod("worker-0"), "master-0": pod("master-0")}
    follower._notice_lost()
    follower.pods.objects = {"master-0": pod("master-0")}
    follower._notice_lost()
    assert len(follower.lost) == 1
    resumed = {"type": "Suspended", "status": "False", "lastTransitionTime": "2026-01-01T00:01:00Z"}
    follower.job["status"] = {"conditions": [resumed]}
    follower._notice_taken(State("created"))
    assert follower.lost == []
    assert follower.taken == {"master-0"}


def following() -> Follower:
    """A follower of a job on a cluster that it never asks."""
    api = Api(client.ApiClient(client.Configuration(host="http://127.0.0.1:1")), "space")
    made = "2026-01-01T00:00:00Z"
    job = {"metadata": {"name": "train-0", "uid": "job", "creationTimestamp": made}}
    ending = Ending(api, None, threading.Event())
    return Follower(api, KINDS["pytorchjob"], job, ending, None)
