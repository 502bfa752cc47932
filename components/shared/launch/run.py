"""One launch from start to end: check, create or adopt, follow, try again, report."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.shared.cluster.api import Api, Object, core
from kfp_ddp.components.shared.launch import check_job as preflight
from kfp_ddp.components.shared.launch.ending import Ending
from kfp_ddp.components.shared.launch.follow.failure import Failure, root_cause
from kfp_ddp.components.shared.launch.follow.follower import (
    Cancelled,
    Ended,
    Follower,
    Limits,
    ended,
)
from kfp_ddp.components.shared.launch.identity import find_owner, identify
from kfp_ddp.components.shared.launch.jobs import Jobs, was_preempted, was_reported
from kfp_ddp.components.shared.launch.manifests.kinds import state
from kfp_ddp.components.shared.launch.manifests.specification import LaunchSpec

APART_SECONDS = 120.0


@dataclass(frozen=True)
class Finished:
    """A launch that succeeded: its last job and how many attempts it took."""

    job: Object
    attempts: int


def launch(
    spec: LaunchSpec,
    run_id: str,
    task_name: str,
    task_id: str,
    api: Api,
    run_dir: Path | None = None,
    progress: bool = False,
) -> Finished:
    """Run the job of a specification to its end, whatever happens to this process meanwhile.

    Args:
        spec: The job.
        run_id: Id of the pipeline run.
        task_name: Name of the task in the pipeline.
        task_id: Tells iterations of a loop apart; '' outside of one.
        api: The cluster, in the namespace of the job.
        run_dir: Folder on a claim for the heartbeat and the place in the logs.
        progress: Whether the job writes metrics there, which become lines of progress.

    Raises:
        InputError: what cannot be used, before anything is created; a job that failed, was
            cancelled, or took too long, with its root cause.
    """
    identity = identify(run_id, task_name, task_id, spec)
    owner = find_owner(api)
    jobs = Jobs(api, spec, identity, owner)
    attempts = jobs.attempts()
    attempt, first = _where_to_start(attempts)
    if attempt not in attempts:
        for warning in preflight.check(api, spec):
            print(f"warning: {warning}", flush=True)
        if spec.scheduler == "kueue" and spec.queue:
            jobs.check_queued(attempt)
    preempted = {number for number, job in attempts.items() if was_preempted(job)}
    ending = Ending(api, owner, threading.Event())
    with ending.watching():
        while True:
            ending.job_path = jobs.path(attempt)
            over = _follow(jobs, attempt, ending, run_dir, progress)
            if over.state.phase == "succeeded":
                return Finished(over.job, attempt - first + 1)
            if over.preempted:
                jobs.mark_preempted(attempt)
                preempted.add(attempt)
                name = jobs.identity.job_name(attempt)
                print(f"{name} could not go on after its preemption; making a new job", flush=True)
                _wait_for_pods(jobs, attempt, ending)
                attempt += 1
                continue
            failure = _cause(over, spec)
            used = [number for number in range(first, attempt) if number not in preempted]
            left = spec.retries - len(used)
            kept = state(over.job).phase == "failed"
            if not kept:
                ending.delete_job()
            if not failure.retryable or left <= 0:
                jobs.mark_reported(attempt)
                raise InputError(_report(jobs, attempt, first, failure, kept))
            print(
                f"{failure.line}; trying again, {left} of {spec.retries} retries left", flush=True
            )
            _wait_for_pods(jobs, attempt, ending)
            attempt += 1


def _where_to_start(attempts: dict[int, Object]) -> tuple[int, int]:
    """The attempt to follow or make, and the first of its series.

    A failed job whose failure was not told yet is ours to judge; one that was told is over, and
    the step was run again by somebody who wants a new one.
    """
    if not attempts:
        return 0, 0
    newest = max(attempts)
    told = [number for number, job in attempts.items() if was_reported(job)]
    first = max(told) + 1 if told else min(attempts)
    if was_preempted(attempts[newest]):
        return newest + 1, first
    if was_reported(attempts[newest]) and state(attempts[newest]).phase == "failed":
        return newest + 1, newest + 1
    return newest, first


def _cause(over: Ended, spec: LaunchSpec) -> Failure:
    """Why a job failed; at its deadline its pods tell of a signal only, which is no cause."""
    if over.state.past_deadline:
        limit = f"deadline_minutes={spec.deadline_minutes:g}"
        line = f"it took longer than {limit} and was ended; its checkpoints are kept"
        return Failure(line, retryable=False)
    return root_cause(over.pods, over.state.message, over.last_lines, over.lost)


def _follow(
    jobs: Jobs, attempt: int, ending: Ending, run_dir: Path | None, progress: bool
) -> Ended:
    spec = jobs.spec
    # A job that may be tried again as a whole is not left to pods that cannot meet any more.
    whole = spec.retries and not spec.elastic and spec.restart_policy == "Never"
    apart = APART_SECONDS if whole and spec.kind in ("pytorchjob", "trainjob") else 0
    limits = Limits(
        deadline=spec.deadline_minutes * 60,
        pending=spec.pending_minutes * 60,
        least=spec.node_range()[0] if spec.elastic else 0,
        crashes=spec.restarts() if spec.elastic else 0,
        apart=apart,
    )
    try:
        if ending.cancelled():
            raise Cancelled
        job = jobs.ensure(attempt)
        follower = Follower(jobs.api, jobs.kind, job, ending, run_dir, progress)
        return follower.run(limits)
    except Cancelled:
        name = jobs.identity.job_name(attempt)
        raise InputError(f"the run was terminated; {jobs.kind.title} {name} is deleted") from None


def _wait_for_pods(jobs: Jobs, attempt: int, ending: Ending) -> None:
    """Wait until the failed attempt writes no more, lest two jobs share one folder.

    The operator removes running pods of a failed job, and they may save before they go. A pod
    on a node that is gone stays for ever, so the wait has an end.
    """
    selector = jobs.kind.pod_selector(jobs.identity.job_name(attempt))
    path = core(jobs.api.namespace, "pods")
    query = {"labelSelector": selector}
    deadline = time.monotonic() + jobs.spec.grace_seconds + 60
    while time.monotonic() < deadline and not ending.cancelled():
        found = jobs.api.patient(lambda: jobs.api.call("GET", path, query=query))
        if all(ended(pod) for pod in found["items"]):
            return
        time.sleep(0.5)


def _report(jobs: Jobs, attempt: int, first: int, failure: Failure, kept: bool) -> str:
    """The failure in one line; `kept` is whether its pod may still be there to be asked."""
    name = jobs.identity.job_name(attempt)
    tries = f" after {attempt - first + 1} attempts" if attempt > first else ""
    where = "; log above" if failure.pod else ""
    if failure.pod and kept:
        where += f", or kubectl logs -n {jobs.api.namespace} {failure.pod}"
    return f"{jobs.kind.title} {name} failed{tries}: {failure.line}{where}"
