"""A job of many workers from its creation to its end: some are replaced, and then some fail."""

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.k8s.api import DELETE, Api
from kfp_ddp.k8s.watch_cache import WatchCache
from tests.e2e.harness.measured_launch import Launch
from tests.e2e.harness.stand_in import Kubelets, asks_for, standing_in

IMAGE = "ghcr.io/kfp-ddp/trainer:0.1.0"
PODS_A_NODE = 50
LOST_PEER = "RuntimeError: Connection closed by peer [10.0.0.1]:1"
TRACEBACK = ("Traceback (most recent call last):", "ValueError: no layer 5")
LONGEST_SECONDS = 900.0
T = TypeVar("T")


@dataclass(frozen=True)
class Played:
    """What became of a job of many workers."""

    launch: Launch
    kubelets: Kubelets
    pods: list[str]
    """Their names, by number."""
    first: str
    """The one that failed first."""
    failed_at: float
    """When a watch showed the job to have failed, in seconds since 1970."""
    ended_at: float
    """When the launch had ended."""


def play(
    api: Api, folder: Path, count: int, failing: int, replaced: int, seconds: float = 0
) -> Played:
    """Launch a job of so many workers, let them run for some seconds, and fail.

    Args:
        api: The cluster, as its administrator, in the namespace of the job.
        folder: For the run and the stand-in's certificate.
        count: Workers.
        failing: How many of them fail, one of the middle before the others.
        replaced: How many are replaced before, by new pods of their names.
        seconds: How long all run.
    """
    spec = {"image": IMAGE, "command": ["true"], "nodes": count, "nproc_per_node": 1}
    spec |= {"retries": 0, "restart_policy": "ExitCode", **asks_for(api.namespace)}
    changed = threading.Event()
    kind = KINDS["pytorchjob"]
    jobs = WatchCache(api, kind.path(api.namespace), {}, changed)
    jobs.start()
    with standing_in(api, -(-count // PODS_A_NODE), folder) as kubelets:
        launch = Launch(spec, str(uuid.uuid4()), api.namespace, folder)
        try:
            pods = _running(kubelets, launch, count, set())
            present = kubelets.running()
            gone = {present[pod] for pod in pods[count - replaced :]}
            kubelets.end(pods[count - replaced :], 137)
            _running(kubelets, launch, count, gone)
            _work(kubelets, pods, seconds)
            first = pods[count // 2]
            kubelets.end([first], 1, "", *TRACEBACK)
            others = [pod for pod in pods if pod != first]
            ends = threading.Thread(
                target=kubelets.end, args=(others[len(others) + 1 - failing :], 1, "", LOST_PEER)
            )
            ends.start()
            _until(lambda: any(kind.state(job).over for job in jobs.objects.values()), launch)
            failed_at = time.time()
            launch.wait(LONGEST_SECONDS)
            ended_at = launch.times[-1]
            ends.join()
        finally:
            launch.stop()
            jobs.stop()
            api.call("DELETE", jobs.path, DELETE, retry=True)
    return Played(launch, kubelets, pods, first, failed_at, ended_at)


def _work(kubelets: Kubelets, pods: list[str], seconds: float) -> None:
    """Let every pod write a line each second, and one at least."""
    until, step = time.monotonic() + seconds, 0
    while not step or time.monotonic() < until:
        for pod in pods:
            kubelets.logs.write(pod, f"{pod} is at step {step}")
        step += 1
        time.sleep(1 if seconds else 0)


def _running(kubelets: Kubelets, launch: Launch, count: int, besides: set[str]) -> list[str]:
    """The names of so many pods that run and have other uids than these, by number."""

    def all_run() -> list[str]:
        assert launch.process.poll() is None, "\n".join(launch.lines)
        result = [name for name, uid in kubelets.running().items() if uid not in besides]
        return result if len(result) == count else []

    return sorted(_until(all_run, launch), key=number)


def _until(condition: Callable[[], T], launch: Launch) -> T:
    deadline = time.monotonic() + LONGEST_SECONDS
    while not (answer := condition()):
        assert time.monotonic() < deadline, "\n".join(launch.lines)
        time.sleep(0.05)
    return answer


def number(pod: str) -> int:
    """The number of a worker, by its name."""
    return int(pod.rpartition("-")[2])
