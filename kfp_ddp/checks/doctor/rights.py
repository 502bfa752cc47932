"""What the account of the steps may do."""

from kfp_ddp.checks.doctor.finding import Asked, Finding
from kfp_ddp.jobs import kueue
from kfp_ddp.jobs.gang import GANGS
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.k8s.api import Api, ApiError, review

Right = tuple[str, str, str, bool]
"""Group, resource, verbs, and whether a run fails without it."""
JOB_VERBS = "create get list watch patch delete"
RIGHTS: tuple[Right, ...] = (
    ("", "pods", "get list watch", True),
    ("", "pods/log", "get", True),
    ("argoproj.io", "workflows", "get list watch", True),
    ("", "persistentvolumeclaims", "get", True),
    ("", "events", "list watch", False),
    ("", "configmaps", "create get", False),
    ("trainer.kubeflow.org", "trainingruntimes", "get", False),
)
COPY_VERBS = "create list patch delete"
# With Kueue, to say what a job waits for.
KUEUE_RIGHTS: tuple[Right, ...] = (
    (kueue.GROUP, "localqueues", "get", False),
    (kueue.GROUP, "workloads", "list", False),
)


def of_jobs(backend: str) -> tuple[Right, ...]:
    """Those on each kind of job; a run needs that of its backend."""
    return tuple(
        (kind.group, kind.plural, JOB_VERBS, name == backend) for name, kind in KINDS.items()
    )


def of_gangs(*schedulers: str) -> tuple[Right, ...]:
    """Those by which it is seen that the pods of a job start together."""
    groups = [GANGS[name].group_version.partition("/")[0] for name in schedulers if name in GANGS]
    return tuple((group, "podgroups", "get", False) for group in groups)


def of_service(service: str) -> tuple[Right, ...]:
    """That by which a model is rolled out, where a service is named."""
    return (("serving.kserve.io", "inferenceservices", JOB_VERBS, True),) if service else ()


def rights(api: Api, asked: Asked) -> list[Finding]:
    """One finding for each resource that a launch uses, with the verbs that lack."""
    try:
        queues = KUEUE_RIGHTS if kueue.group_version(api) else ()
    except ApiError:
        queues = ()
    optional = (*of_gangs(asked.scheduler), *queues, *of_service(asked.service))
    wanted = (*of_jobs(asked.backend), *RIGHTS, *optional)
    remedy = f"kubectl apply -n {api.namespace} -k deploy/rbac"
    found = _lacking(api, asked, wanted, "rights on", remedy)
    if asked.gpus_per_node >= 0 or asked.backend == "local":
        return found
    # Which belong to no namespace, so the right is asked for in none.
    everywhere = Api(api.client, "")
    remedy = f"set namespace: {api.namespace} in deploy/rbac/nodes and kubectl apply -k it"
    nodes = ("", "nodes", "list", True)
    return found + _lacking(everywhere, asked, (nodes,), "rights on", remedy, api.namespace)


def copy_rights(api: Api, asked: Asked) -> list[Finding]:
    """The same for what dataset_volume needs, unless publish is in-place."""
    needed = asked.publish not in ("in-place", "none", "auto")
    remedy = f"set namespace: {api.namespace} in deploy/storage and kubectl apply -k it"
    right = ("", "persistentvolumeclaims", COPY_VERBS, needed)
    return _lacking(api, asked, (right,), "rights to copy", remedy)


def _lacking(
    api: Api,
    asked: Asked,
    rights: tuple[Right, ...],
    title: str,
    remedy: str,
    namespace: str = "",
) -> list[Finding]:
    namespace = namespace or api.namespace
    account = asked.service_account
    who = f"system:serviceaccount:{namespace}:{account}" if account else ""
    found = []
    for group, resource, verbs, needed in rights:
        plural, _, sub = resource.partition("/")
        try:
            lacking = [v for v in verbs.split() if not review(api, v, group, plural, sub, who)]
        except ApiError as error:
            said = f"cannot be asked for: {' '.join(error.message.split())}"
            remedy = "run it as somebody who may create subjectaccessreviews"
            return [Finding("warn", "rights", said, remedy)]
        what = f"{title} {resource}"
        if not lacking:
            found.append(Finding("ok", what, verbs.replace(" ", ", ")))
            continue
        where = f" in {api.namespace}" if api.namespace else ""
        said = f"no right to {', '.join(lacking)}{where}"
        found.append(Finding("bad" if needed else "warn", what, said, remedy))
    return found
