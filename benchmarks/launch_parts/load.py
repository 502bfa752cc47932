"""A job of many workers: some are replaced, then some fail."""

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.launch_parts.kubelets import Kubelets, run_kubelets, specification
from benchmarks.launch_parts.measurement import Launch
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.k8s.api import IN_BACKGROUND, Api
from kfp_ddp.k8s.watch_cache import WatchCache

IMAGE = "ghcr.io/kfp-ddp/trainer:0.2.0"
PODS_A_NODE = 50
LOST_PEER = "RuntimeError: Connection closed by peer [10.0.0.1]:1"
TRACEBACK = ("Traceback (most recent call last):", "ValueError: no layer 5")
LONGEST_SECONDS = 900.0
T = TypeVar("T")


@dataclass(frozen=True)
class FailedJob:
    """A job of many workers after its failure."""

    launch: Launch
    kubelets: Kubelets
    pods: list[str]
    """Names, by number."""
    first: str
    """The pod that failed first."""
    failed_at: float
    """When a watch first showed the job failed, in seconds since 1970."""
    ended_at: float
    """When the launch ended, in seconds since 1970."""


def run_job(
    api: Api, folder: Path, count: int, failing: int, replaced: int, seconds: float = 0
) -> FailedJob:
    """Launch a job, let its workers run, replace some of them, and let some fail.

    Args:
        api: An administrator of the cluster, in the namespace of the job.
        folder: For the run and the certificate of the kubelets.
        count: Number of workers.
        failing: Number of workers that fail. One in the middle fails first.
        replaced: Number of workers that are first replaced by new pods of the same names.
        seconds: How long all workers run.
    """
    spec = {"image": IMAGE, "command": ["true"], "nodes": count, "nproc_per_node": 1}
    spec |= {"retries": 0, "restart_policy": "ExitCode", **specification(api.namespace)}
    changed = threading.Event()
    kind = KINDS["pytorchjob"]
    jobs = WatchCache(api, kind.resource, {}, changed)
    jobs.start()
    with run_kubelets(api, -(-count // PODS_A_NODE), folder) as kubelets:
        launch = Launch(spec, str(uuid.uuid4()), api.namespace, folder)
        try:
            pods = _wait_for_pods(kubelets, launch, count, set())
            uids = kubelets.running()
            gone = {uids[pod] for pod in pods[count - replaced :]}
            kubelets.end(pods[count - replaced :], 137)
            _wait_for_pods(kubelets, launch, count, gone)
            _work(kubelets, pods, seconds)
            first = pods[count // 2]
            kubelets.end([first], 1, "", *TRACEBACK)
            others = [pod for pod in pods if pod != first]
            ends = threading.Thread(
                target=kubelets.end, args=(others[len(others) + 1 - failing :], 1, "", LOST_PEER)
            )
            ends.start()
            _wait_until(lambda: any(kind.state(job).over for job in jobs.objects.values()), launch)
            failed_at = time.time()
            launch.wait(LONGEST_SECONDS)
            ended_at = launch.times[-1]
            ends.join()
        finally:
            launch.stop()
            jobs.stop()
            api.call("DELETE", kind.resource.path(api.namespace), IN_BACKGROUND, retry=True)
    return FailedJob(launch, kubelets, pods, first, failed_at, ended_at)


def _work(kubelets: Kubelets, pods: list[str], seconds: float) -> None:
    """Let every pod write a line each second, at least one."""
    until, step = time.monotonic() + seconds, 0
    while not step or time.monotonic() < until:
        for pod in pods:
            kubelets.logs.write(pod, f"{pod} is at step {step}")
        step += 1
        time.sleep(1 if seconds else 0)


def _wait_for_pods(kubelets: Kubelets, launch: Launch, count: int, excluded: set[str]) -> list[str]:
    """Return the names of `count` running pods with other uids than `excluded`, by number."""

    def all_run() -> list[str]:
        assert launch.process.poll() is None, "\n".join(launch.lines)
        result = [name for name, uid in kubelets.running().items() if uid not in excluded]
        return result if len(result) == count else []

    return sorted(_wait_until(all_run, launch), key=number)


def _wait_until(condition: Callable[[], T], launch: Launch) -> T:
    deadline = time.monotonic() + LONGEST_SECONDS
    while not (answer := condition()):
        assert time.monotonic() < deadline, "\n".join(launch.lines)
        time.sleep(0.05)
    return answer


def number(pod: str) -> int:
    """Return the number in the name of a worker's pod."""
    return int(pod.rpartition("-")[2])
