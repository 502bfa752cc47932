"""Check the rights of the steps' account, and the secret with a bucket's credentials."""

import base64
import binascii
import json

from kfp_ddp.checks.finding import ASK_ADMIN, Cluster, Finding, Requirements
from kfp_ddp.core.text import one_line
from kfp_ddp.jobs import kueue
from kfp_ddp.jobs.check_job import GANGS
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.k8s.api import Api, ApiError, Object, core, review

Right = tuple[str, str, str, bool]
"""Group, resource, verbs, and whether a run fails without the right."""
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
# To report why Kueue does not admit a job.
KUEUE_RIGHTS: tuple[Right, ...] = (
    (kueue.GROUP, "localqueues", "get", False),
    (kueue.GROUP, "workloads", "list", False),
)
GOOGLE, WEB = "key.json", "netrc"
AMAZON = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
AZURE = ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_CONNECTION_STRING")
HUGGING_FACE = "HF_TOKEN"


def job_rights(backend: str) -> tuple[Right, ...]:
    """Return the rights on each kind of job; those of the backend are required."""
    return tuple(
        (kind.group, kind.plural, JOB_VERBS, name == backend) for name, kind in KINDS.items()
    )


def gang_rights(*schedulers: str) -> tuple[Right, ...]:
    """Return the rights to read the pod groups of gang schedulers."""
    groups = [GANGS[name].group for name in schedulers if name in GANGS]
    return tuple((group, "podgroups", "get", False) for group in groups)


def service_rights(service: str) -> tuple[Right, ...]:
    """Return the right to roll out a model, if a service is named."""
    return (("serving.kserve.io", "inferenceservices", JOB_VERBS, True),) if service else ()


def rights(cluster: Cluster) -> list[Finding]:
    """Check the rights on each resource that a launch and dataset_volume use."""
    api, run = cluster.api, cluster.run
    try:
        queues = KUEUE_RIGHTS if kueue.group_version(api) else ()
    except ApiError:
        queues = ()
    optional = (*gang_rights(run.scheduler), *queues, *service_rights(run.service))
    install = f"kfp-ddp install -n {api.namespace}"
    copied = run.publish not in ("in-place", "none", "auto")
    copies = ("", "persistentvolumeclaims", COPY_VERBS, copied)
    try:
        findings = [
            _right(api, run, right, "rights on", install)
            for right in (*job_rights(run.backend), *RIGHTS, *optional)
        ]
        if run.gpus_per_node < 0 and run.backend != "local":
            nodes = ("", "nodes", "list", True)
            findings.append(_right(api, run, nodes, "rights on", install))
        findings.append(_right(api, run, copies, "rights to copy", f"{install} --copies"))
    except ApiError as error:
        message = f"cannot be checked: {one_line(error.message)}"
        remedy = "run it with an account that may create subjectaccessreviews"
        return [Finding("warn", "rights", message, remedy)]
    return findings


def _right(api: Api, run: Requirements, right: Right, title: str, remedy: str) -> Finding:
    """Return the finding about a right; raises ApiError if it cannot be checked."""
    group, resource, verbs, required = right
    account = run.service_account
    user = f"system:serviceaccount:{api.namespace}:{account}" if account else ""
    # Nodes have no namespace.
    scope = Api(api.client, "") if resource == "nodes" else api
    plural, _, sub = resource.partition("/")
    missing = [v for v in verbs.split() if not review(scope, v, group, plural, sub, user)]
    what = f"{title} {resource}"
    if not missing:
        return Finding("ok", what, verbs.replace(" ", ", "))
    where = f" in {scope.namespace}" if scope.namespace else ""
    message = f"no right to {', '.join(missing)}{where}"
    return Finding("bad" if required else "warn", what, message, remedy)


def secret(cluster: Cluster) -> list[Finding]:
    """Check the secret of the bucket; without one, steps use the credentials of their account."""
    api, name = cluster.api, cluster.run.bucket_secret
    what = f"secret {name}"
    create = f"kubectl create secret generic -n {api.namespace} {name} --from-file={GOOGLE}"
    try:
        result = api.call("GET", core(api.namespace, "secrets", name))
    except ApiError as error:
        if error.status != 404:
            return [Finding("warn", what, "may not be read", ASK_ADMIN)]
        if name != Requirements.bucket_secret:
            return [Finding("bad", what, "does not exist", create)]
        message = "does not exist: buckets are accessed with the steps' account, or not at all"
        return [Finding("warn", what, message, f"if that is not enough, {create}")]
    data: Object = result.get("data") or {}
    problem = _secret_problem(data)
    if not problem:
        return [Finding("ok", what, f"has {', '.join(sorted(data))}")]
    remedy = f"kubectl delete secret -n {api.namespace} {name}; {create}"
    return [Finding("bad", what, problem, remedy)]


def _secret_problem(data: Object) -> str:
    """Return what is wrong with the base64 values of a secret; '' for nothing."""
    amazon = [key for key in AMAZON if data.get(key)]
    if not amazon and not any(key in data for key in (GOOGLE, WEB, HUGGING_FACE, *AZURE)):
        known = f"neither {GOOGLE} nor {AMAZON[0]} nor {AZURE[0]}"
        return f"has {', '.join(sorted(data)) or 'nothing'}, and {known}"
    if len(amazon) == 1:
        (missing,) = set(AMAZON) - set(amazon)
        return f"has {amazon[0]} without {missing}"
    if GOOGLE not in data:
        return ""
    try:
        key = json.loads(base64.b64decode(data[GOOGLE]))
    except (ValueError, binascii.Error):
        return f"its {GOOGLE} is not JSON"
    if not isinstance(key, dict) or "type" not in key:
        return f"its {GOOGLE} is not a key of a service account: it has no type"
    fields = sorted({"client_email", "private_key"} - key.keys())
    if key["type"] == "service_account" and fields:
        return f"its {GOOGLE} lacks {' and '.join(fields)}"
    return ""
