"""One launch from start to end: check, create or adopt, follow, retry, report."""

from dataclasses import dataclass, field
from pathlib import Path

from kfp_ddp.core.errors import JobError
from kfp_ddp.core.failure import Failure
from kfp_ddp.core.log import log
from kfp_ddp.jobs import check_job, gangs
from kfp_ddp.jobs.ending import Ending
from kfp_ddp.jobs.follow.decisions import Limits
from kfp_ddp.jobs.follow.follower import Follower, Outcome
from kfp_ddp.jobs.identity import find_owner, identify
from kfp_ddp.jobs.jobs import PREEMPTED, REPORTED, Jobs, avoided
from kfp_ddp.jobs.kinds import Kind
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Api, Object, poll
from kfp_ddp.k8s.objects import annotation
from kfp_ddp.k8s.resource import PODS

HEARTBEAT_SECONDS = 120.0
LEAST_CRASHES = 10
"""Crashes that end a job of few nodes whose operator replaces pods; a larger job has two a node."""
# A list of a thousand pods is 10 MB, and this one is requested each half a second.
ONE_WRITING = {
    "fieldSelector": "status.phase!=Succeeded,status.phase!=Failed,status.phase!=Pending",
    "limit": "1",
}


def launch(
    spec: LaunchSpec,
    run_id: str,
    task_name: str,
    task_id: str,
    api: Api,
    run_dir: Path | None = None,
    progress: bool = False,
    stall_minutes: float = 0,
) -> Outcome:
    """Run a job to its success; a retry of this process continues where it was.

    `task_id` distinguishes iterations of a loop. `run_dir` is a folder on a PVC for the heartbeat,
    the log cursors and, with `progress`, the metrics that are printed; ranks may stall for
    `stall_minutes` by these, 0 for no limit. InputError before anything is created, JobError with
    the root cause, RunCancelledError after the job was deleted.
    """
    owner = find_owner(api)
    jobs = Jobs(api, spec, identify(run_id, task_name, task_id, spec), owner)
    existing = jobs.attempts()
    attempts = Attempts.resume(existing, jobs.kind)
    jobs.avoided = avoided(existing)
    if attempts.current not in existing:
        for warning in check_job.check(api, spec):
            log.warning(warning)
        if spec.scheduler == "kueue" and spec.queue:
            jobs.check_queued(attempts.current)
    limits = _limits(spec, stall_minutes)
    ending = Ending(api, owner)
    with ending.watching():
        while True:
            ending.watch_job(jobs.kind.resource, jobs.identity.job_name(attempts.current))
            outcome = _follow(jobs, attempts.current, ending, run_dir, progress, limits)
            if outcome.failure is None:
                return outcome
            if outcome.given_up:
                ending.delete_job()
            if outcome.node:
                jobs.avoided |= {outcome.node}
            if outcome.preempted:
                jobs.mark(attempts.current, PREEMPTED)
                attempts.preempted.add(attempts.current)
                name = jobs.identity.job_name(attempts.current)
                log.info(f"{name} could not resume after its preemption; creating a new job")
            else:
                _retry_or_raise(jobs, attempts, outcome.failure, outcome.given_up)
            _wait_for_pods(jobs, attempts.current, ending)
            attempts.current += 1


@dataclass
class Attempts:
    """The current attempt of a launch, and the series of attempts that it belongs to."""

    current: int = 0
    first: int = 0
    preempted: set[int] = field(default_factory=set)
    """Attempts that failed only because of a preemption, which use up no retry."""

    @classmethod
    def resume(cls, jobs: dict[int, Object], kind: Kind) -> "Attempts":
        """Return the attempt to continue with, by the existing jobs.

        A failed job whose failure was not reported yet is still to be judged. If it was reported,
        a user has retried the step and expects a new job.
        """
        if not jobs:
            return cls()
        newest = max(jobs)
        reported = [number for number, job in jobs.items() if annotation(job, REPORTED)]
        first = max(reported) + 1 if reported else min(jobs)
        preempted = {number for number, job in jobs.items() if annotation(job, PREEMPTED)}
        failed = newest in reported and kind.state(jobs[newest]).phase == "failed"
        return cls(newest + (failed or newest in preempted), first, preempted)

    def retries_left(self, retries: int) -> int:
        """Return how many of the retries are left after the current attempt."""
        return retries - len(set(range(self.first, self.current)) - self.preempted)


def _retry_or_raise(jobs: Jobs, attempts: Attempts, failure: Failure, deleted: bool) -> None:
    """Return if another attempt may help, else raise JobError with the cause."""
    retries = jobs.spec.retries
    left = attempts.retries_left(retries)
    if not failure.retryable or left <= 0:
        jobs.mark(attempts.current, REPORTED)
        name = jobs.identity.job_name(attempts.current)
        count = attempts.current - attempts.first + 1
        tries = f" after {count} attempts" if count > 1 else ""
        where = "; log above" if failure.pod else ""
        if failure.pod and not deleted:
            where += f", or kubectl logs -n {jobs.api.namespace} {failure.pod}"
        raise JobError(f"{jobs.kind.title} {name} failed{tries}: {failure.error}{where}")
    log.info(f"{failure.error}; retrying, {left} of {retries} retries left")


def _follow(
    jobs: Jobs, number: int, ending: Ending, run_dir: Path | None, progress: bool, limits: Limits
) -> Outcome:
    ending.leave_if_cancelled(f"{jobs.kind.title} {jobs.identity.job_name(number)}")
    job = jobs.ensure(number)
    gangs.check_gang(jobs.api, jobs.spec, job, ending.cancelled)
    sent = jobs.manifest(number)
    return Follower(jobs.api, jobs.kind, job, ending, run_dir, progress, sent).run(limits)


def _limits(spec: LaunchSpec, stall_minutes: float) -> Limits:
    kind = spec.job_kind
    # Without restarts, a job with separated pods cannot recover.
    rigid = spec.restart_policy == "Never"
    return Limits(
        deadline=spec.deadline_minutes * 60,
        pending=spec.pending_minutes * 60,
        crashes=max(LEAST_CRASHES, 2 * spec.nodes) if kind.replaces_pods else 0,
        silence=HEARTBEAT_SECONDS if rigid and kind.waits_silently else 0,
        pods=spec.nodes + kind.extra_pods,
        stall=stall_minutes * 60,
    )


def _wait_for_pods(jobs: Jobs, attempt: int, ending: Ending) -> None:
    """Wait, up to a limit, until the failed attempt writes no more: no two jobs share a folder."""
    selector = jobs.kind.pod_selector(jobs.identity.job_name(attempt))
    path = PODS.path(jobs.api.namespace)
    query = {"labelSelector": selector, **ONE_WRITING}
    for late in poll(jobs.spec.grace_seconds + 60, 0.5):
        if late or ending.cancelled():
            return
        pods = jobs.api.call("GET", path, query=query, retry=True)
        if not pods["items"] and not pods["metadata"].get("continue"):
            return
