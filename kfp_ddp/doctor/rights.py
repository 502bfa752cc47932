"""Whether an account has the rights that a launch and its data use."""

from kfp_ddp.components.shared.cluster.api import Api, ApiError
from kfp_ddp.components.shared.cluster.rights import review
from kfp_ddp.components.shared.launch import kueue
from kfp_ddp.doctor.finding import Finding

# Every right that a launch uses: group, resource, verbs, and whether it fails without it.
RIGHTS = (
    ("kubeflow.org", "pytorchjobs", "create get list watch patch delete", True),
    ("trainer.kubeflow.org", "trainjobs", "create get list watch patch delete", False),
    ("kubeflow.org", "tfjobs", "create get list watch patch delete", False),
    ("kubeflow.org", "mpijobs", "create get list watch patch delete", False),
    ("", "pods", "get list watch", True),
    ("", "pods/log", "get", True),
    ("argoproj.io", "workflows", "get list watch", True),
    ("", "persistentvolumeclaims", "get", True),
    ("", "events", "list watch", False),
    ("", "configmaps", "create", False),
)
COPY_RIGHTS = (("", "persistentvolumeclaims", "create list patch delete", False),)
# And with Kueue, to say what a job waits for.
KUEUE_RIGHTS = (
    (kueue.GROUP, "localqueues", "get", False),
    (kueue.GROUP, "workloads", "list", False),
)


def rights(api: Api, service_account: str) -> list[Finding]:
    """One finding for each resource that a launch uses, with the verbs that lack."""
    try:
        wanted = (*RIGHTS, *KUEUE_RIGHTS) if kueue.group_version(api) else RIGHTS
    except ApiError:
        wanted = RIGHTS
    remedy = f"kubectl apply -n {api.namespace} -k deploy/rbac"
    return _lacking(api, service_account, wanted, "rights on", remedy)


def copy_rights(api: Api, service_account: str) -> list[Finding]:
    """The same for what dataset_volume needs, unless publish is in-place."""
    remedy = f"set namespace: {api.namespace} in deploy/storage and apply it; see deploy/README.md"
    return _lacking(api, service_account, COPY_RIGHTS, "rights to copy", remedy)


def _lacking(
    api: Api,
    service_account: str,
    rights: tuple[tuple[str, str, str, bool], ...],
    title: str,
    remedy: str,
) -> list[Finding]:
    who = f"system:serviceaccount:{api.namespace}:{service_account}" if service_account else ""
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
        said = f"no right to {', '.join(lacking)} in {api.namespace}"
        found.append(Finding("bad" if needed else "warn", what, said, remedy))
    return found
