"""One launch from start to end: check, create or adopt, follow, try again, report."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from kfp_ddp.base.errors import JobError
from kfp_ddp.base.failure import Failure
from kfp_ddp.components.shared.cluster.api import Api, Object, core
from kfp_ddp.components.shared.launch import check_job
from kfp_ddp.components.shared.launch.ending import Ending
from kfp_ddp.components.shared.launch.follow.decisions import Limits
from kfp_ddp.components.shared.launch.follow.follower import Follower, Outcome
from kfp_ddp.components.shared.launch.follow.pods import writes_no_more
from kfp_ddp.components.shared.launch.follow.root_cause import root_cause
from kfp_ddp.components.shared.launch.identity import find_owner, identify
from kfp_ddp.components.shared.launch.job_state import state
from kfp_ddp.components.shared.launch.jobs import Jobs, was_preempted, was_reported
from kfp_ddp.components.shared.launch.manifests.kinds import KINDS
from kfp_ddp.components.shared.launch.manifests.specification import LaunchSpec

SILENCE_SECONDS = 120.0


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
        run_dir: Folder on a claim for the heartbeat and the cursors in the logs.
        progress: Whether the job writes metrics there, which become lines of progress.

    Raises:
        InputError: what cannot be used, before anything is created.
        JobError: a job that failed, with its root cause, or took too long.
        RunCancelledError: the run was terminated; the job is deleted.
    """
    identity = identify(run_id, task_name, task_id, spec)
    owner = find_owner(api)
    jobs = Jobs(api, spec, identity, owner)
    attempts = jobs.attempts()
    attempt, first = _where_to_start(attempts)
    if attempt not in attempts:
        for warning in check_job.check(api, spec):
            print(f"warning: {warning}", flush=True)
        if spec.scheduler == "kueue" and spec.queue:
            jobs.check_queued(attempt)
    preempted = {number for number, job in attempts.items() if was_preempted(job)}
    ending = Ending(api, owner, threading.Event())
    with ending.watching():
        while True:
            ending.job_path = jobs.path(attempt)
            outcome = _follow(jobs, attempt, ending, run_dir, progress)
            if outcome.state.phase == "succeeded":
                return Finished(outcome.job, attempt - first + 1)
            if outcome.preempted:
                jobs.mark_preempted(attempt)
                preempted.add(attempt)
                name = jobs.identity.job_name(attempt)
                print(f"{name} could not go on after its preemption; making a new job", flush=True)
                _wait_for_pods(jobs, attempt, ending)
                attempt += 1
                continue
            failure = _cause(outcome, spec)
            used = [number for number in range(first, attempt) if number not in preempted]
            left = spec.retries - len(used)
            if outcome.given_up:
                ending.delete_job()
            if not failure.retryable or left <= 0:
                jobs.mark_reported(attempt)
                pods_kept = not outcome.given_up
                raise JobError(_report(jobs, attempt, first, failure, pods_kept))
            print(
                f"{failure.error}; trying again, {left} of {spec.retries} retries left", flush=True
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


def _cause(outcome: Outcome, spec: LaunchSpec) -> Failure:
    """Why a job failed; at its deadline its pods tell of a signal only, which is no cause."""
    if outcome.state.past_deadline:
        limit = f"deadline_minutes={spec.deadline_minutes:g}"
        line = f"it took longer than {limit} and was ended; its checkpoints are kept"
        return Failure(1, -1, line, retryable=False)
    return root_cause(outcome.pods, outcome.state.message, outcome.last_lines, outcome.lost)


def _follow(
    jobs: Jobs, attempt: int, ending: Ending, run_dir: Path | None, progress: bool
) -> Outcome:
    ending.leave_if_cancelled(f"{jobs.kind.title} {jobs.identity.job_name(attempt)}")
    job = jobs.ensure(attempt)
    return Follower(jobs.api, jobs.kind, job, ending, run_dir, progress).run(_limits(jobs.spec))


def _limits(spec: LaunchSpec) -> Limits:
    # A job that may be tried again as a whole is not left to pods that cannot meet any more.
    whole = spec.retries and not spec.elastic and spec.restart_policy == "Never"
    return Limits(
        deadline=spec.deadline_minutes * 60,
        pending=spec.pending_minutes * 60,
        enough_pods=spec.node_range()[0] if spec.elastic else 0,
        crashes=spec.restarts() if spec.elastic else 0,
        silence=SILENCE_SECONDS if whole and KINDS[spec.kind].waits_in_silence else 0,
    )


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
        if all(writes_no_more(pod) for pod in found["items"]):
            return
        time.sleep(0.5)


def _report(jobs: Jobs, attempt: int, first: int, failure: Failure, pods_kept: bool) -> str:
    """The failure in one line; `pods_kept` is whether its pod may still be there to be asked."""
    name = jobs.identity.job_name(attempt)
    tries = f" after {attempt - first + 1} attempts" if attempt > first else ""
    where = "; log above" if failure.pod else ""
    if failure.pod and pods_kept:
        where += f", or kubectl logs -n {jobs.api.namespace} {failure.pod}"
    return f"{jobs.kind.title} {name} failed{tries}: {failure.error}{where}"
