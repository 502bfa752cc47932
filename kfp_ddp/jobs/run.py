"""One launch from start to end: check, create or adopt, follow, try again, report."""

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from kfp_ddp.core.errors import JobError
from kfp_ddp.core.failure import Failure
from kfp_ddp.jobs import check_job
from kfp_ddp.jobs.ending import Ending
from kfp_ddp.jobs.failure import root_cause
from kfp_ddp.jobs.follow.decisions import Limits
from kfp_ddp.jobs.follow.follower import Follower, Outcome
from kfp_ddp.jobs.gang import check_gang
from kfp_ddp.jobs.identity import find_owner, identify
from kfp_ddp.jobs.jobs import PREEMPTED, REPORTED, Jobs, avoided, marked
from kfp_ddp.jobs.kinds import Kind
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Api, Object, core

SILENCE_SECONDS = 120.0
# Only whether there is one is asked, each half a second: a thousand pods are 10 MB.
ONE_THAT_WRITES = {
    "fieldSelector": "status.phase!=Succeeded,status.phase!=Failed,status.phase!=Pending",
    "limit": "1",
}


@dataclass(frozen=True)
class Finished:
    """A launch that succeeded: its last job, how many attempts it took, and the last one's pods.

    `last_lines` are the ends of their logs, by uid.
    """

    job: Object
    attempts: int
    pods: list[Object]
    last_lines: dict[str, list[str]]


def launch(
    spec: LaunchSpec,
    run_id: str,
    task_name: str,
    task_id: str,
    api: Api,
    run_dir: Path | None = None,
    progress: bool = False,
    stall_minutes: float = 0,
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
        stall_minutes: How long its ranks, by what they tell there, may stand still; 0 for ever.

    Raises:
        InputError: what cannot be used, before anything is created.
        JobError: a job that failed, with its root cause, or took too long.
        RunCancelledError: the run was terminated; the job is deleted.
    """
    owner = find_owner(api)
    jobs = Jobs(api, spec, identify(run_id, task_name, task_id, spec), owner)
    there = jobs.attempts()
    attempts = Attempts.of(there, jobs.kind)
    jobs.avoided = avoided(there)
    if attempts.current not in there:
        _check(jobs, attempts.current)
    ending = Ending(api, owner, threading.Event())
    with ending.watching():
        while True:
            ending.job_path = jobs.path(attempts.current)
            limits = _limits(spec, stall_minutes)
            outcome = _follow(jobs, attempts.current, ending, run_dir, progress, limits)
            if outcome.state.phase == "succeeded":
                return Finished(outcome.job, attempts.made, outcome.pods, outcome.last_lines)
            if outcome.given_up:
                ending.delete_job()
            if outcome.stall and outcome.stall.node:
                jobs.avoided |= {outcome.stall.node}
            if outcome.preempted:
                _count_no_attempt(jobs, attempts)
            else:
                _retry_or_raise(jobs, attempts, outcome)
            _wait_for_pods(jobs, attempts.current, ending)
            attempts.current += 1


@dataclass
class Attempts:
    """The attempt that a launch is at, and the series of attempts that it is part of."""

    current: int = 0
    first: int = 0
    preempted: set[int] = field(default_factory=set)
    """Those that failed of their preemption alone, which use up no retry."""

    @classmethod
    def of(cls, jobs: dict[int, Object], kind: Kind) -> "Attempts":
        """Where to start, by the jobs that are there.

        A failed job whose failure was not told yet is ours to judge; one that was told is over, and
        the step was run again by somebody who wants a new one.
        """
        if not jobs:
            return cls()
        newest = max(jobs)
        told = [number for number, job in jobs.items() if marked(job, REPORTED)]
        first = max(told) + 1 if told else min(jobs)
        preempted = {number for number, job in jobs.items() if marked(job, PREEMPTED)}
        if newest in preempted:
            return cls(newest + 1, first, preempted)
        if newest in told and kind.state(jobs[newest]).phase == "failed":
            return cls(newest + 1, newest + 1, preempted)
        return cls(newest, first, preempted)

    @property
    def made(self) -> int:
        """How many there were."""
        return self.current - self.first + 1

    def retries_left(self, retries: int) -> int:
        """How many of so many retries are left after the current attempt."""
        return retries - len(set(range(self.first, self.current)) - self.preempted)


def _check(jobs: Jobs, attempt: int) -> None:
    """Find what can be found before a job is created; raises InputError."""
    for warning in check_job.check(jobs.api, jobs.spec):
        print(f"warning: {warning}", flush=True)
    if jobs.spec.scheduler == "kueue" and jobs.spec.queue:
        jobs.check_queued(attempt)


def _count_no_attempt(jobs: Jobs, attempts: Attempts) -> None:
    jobs.mark(attempts.current, PREEMPTED)
    attempts.preempted.add(attempts.current)
    name = jobs.identity.job_name(attempts.current)
    print(f"{name} could not go on after its preemption; making a new job", flush=True)


def _retry_or_raise(jobs: Jobs, attempts: Attempts, outcome: Outcome) -> None:
    """Return where another attempt may help; raises JobError with the cause where none does."""
    retries, failure = jobs.spec.retries, _cause(outcome, jobs.spec)
    left = attempts.retries_left(retries)
    if not failure.retryable or left <= 0:
        jobs.mark(attempts.current, REPORTED)
        raise JobError(_report(jobs, attempts, failure, pods_kept=not outcome.given_up))
    print(f"{failure.error}; trying again, {left} of {retries} retries left", flush=True)


def _cause(outcome: Outcome, spec: LaunchSpec) -> Failure:
    """Why a job failed; at its deadline its pods tell of a signal only, which is no cause."""
    if outcome.state.past_deadline:
        limit = f"deadline_minutes={spec.deadline_minutes:g}"
        line = f"it took longer than {limit} and was ended; its checkpoints are kept"
        return Failure(1, -1, line, retryable=False)
    if outcome.stall:
        return outcome.stall.failure
    return root_cause(
        outcome.pods,
        outcome.state.message,
        outcome.last_lines,
        outcome.lost,
        outcome.never_started,
    )


def _follow(
    jobs: Jobs,
    attempt: int,
    ending: Ending,
    run_dir: Path | None,
    progress: bool,
    limits: Limits,
) -> Outcome:
    ending.leave_if_cancelled(f"{jobs.kind.title} {jobs.identity.job_name(attempt)}")
    job = jobs.ensure(attempt)
    check_gang(jobs.api, jobs.spec, job, ending.cancelled)
    return Follower(jobs.api, jobs.kind, job, ending, run_dir, progress).run(limits)


def _limits(spec: LaunchSpec, stall_minutes: float) -> Limits:
    # A job that is a whole is not left to pods that cannot meet any more.
    whole = not spec.elastic and spec.restart_policy == "Never"
    return Limits(
        deadline=spec.deadline_minutes * 60,
        pending=spec.pending_minutes * 60,
        enough_pods=spec.node_range()[0] if spec.elastic else 0,
        crashes=spec.restarts() if spec.elastic else 0,
        silence=SILENCE_SECONDS if whole and spec.job_kind.waits_silently else 0,
        pods=spec.pods() + spec.job_kind.extra_pods,
        stall=stall_minutes * 60,
    )


def _wait_for_pods(jobs: Jobs, attempt: int, ending: Ending) -> None:
    """Wait until the failed attempt writes no more, lest two jobs share one folder.

    The operator removes running pods of a failed job, and they may save before they go. A pod
    on a node that is gone stays for ever, so the wait has an end.
    """
    selector = jobs.kind.pod_selector(jobs.identity.job_name(attempt))
    path = core(jobs.api.namespace, "pods")
    query = {"labelSelector": selector, **ONE_THAT_WRITES}
    deadline = time.monotonic() + jobs.spec.grace_seconds + 60
    while time.monotonic() < deadline and not ending.cancelled():
        found = jobs.api.call("GET", path, query=query, retry=True)
        if not found["items"] and not found["metadata"].get("continue"):
            return
        time.sleep(0.5)


def _report(jobs: Jobs, attempts: Attempts, failure: Failure, pods_kept: bool) -> str:
    """The failure in one line; `pods_kept` is whether its pod may still be there to be asked."""
    name = jobs.identity.job_name(attempts.current)
    tries = f" after {attempts.made} attempts" if attempts.made > 1 else ""
    where = "; log above" if failure.pod else ""
    if failure.pod and pods_kept:
        where += f", or kubectl logs -n {jobs.api.namespace} {failure.pod}"
    return f"{jobs.kind.title} {name} failed{tries}: {failure.error}{where}"
