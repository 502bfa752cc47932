"""Check the rights of the steps' account, the bucket's secret, and that pods are admitted."""

import base64
import binascii
import contextlib
import itertools
import math
from typing import Any

from kfp_ddp.checks.finding import ASK_ADMIN, CheckContext, Finding, Requirements, items
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import from_json, one_line, yaml_of
from kfp_ddp.jobs import kueue
from kfp_ddp.jobs.gangs import GANGS
from kfp_ddp.jobs.kinds import KINDS, pod
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import LAUNCHER, STEPS, Api, ApiError, Object, review
from kfp_ddp.k8s.objects import label, parse_quantity
from kfp_ddp.k8s.resource import CONFIG_MAPS, NAMESPACES, PODS, Resource
from kfp_ddp.plan.form import EVALUATE_REQUESTS, LAUNCHER_REQUESTS, StepResources

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
# To report why Kueue does not admit a job.
KUEUE_RIGHTS: tuple[Right, ...] = (
    (kueue.GROUP, "localqueues", "get", False),
    (kueue.GROUP, "workloads", "list", False),
)
GOOGLE = "key.json"
WEB = "netrc"
AMAZON = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
AZURE = ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_CONNECTION_STRING")
HUGGING_FACE = "HF_TOKEN"


def launch_rights(backend: str, service: str, *schedulers: str) -> list[Right]:
    """Return the rights of a launch, of which some are optional; with pod groups and a service."""
    required = [
        (kind.resource.group, kind.resource.plural, JOB_VERBS, name == backend)
        for name, kind in KINDS.items()
    ]
    required += RIGHTS
    for name in schedulers:
        if name in GANGS:
            required.append((GANGS[name].resource.group, "podgroups", "get", False))
    if service:
        required.append(("serving.kserve.io", "inferenceservices", JOB_VERBS, True))
    return required


def rights(cluster: CheckContext) -> list[Finding]:
    """Check the rights on each resource that a launch and dataset_volume use."""
    api = cluster.api
    run = cluster.run
    required = launch_rights(run.backend, run.service, run.scheduler)
    with contextlib.suppress(ApiError):
        if kueue.group_version(api):
            required += KUEUE_RIGHTS
    if run.gpus_per_node < 0 and run.backend != "local":
        required.append(("", "nodes", "list", True))
    install = f"kfp-ddp install -n {api.namespace}"
    copied = run.publish not in ("in-place", "none", "auto")
    copies = ("", "persistentvolumeclaims", "create list patch delete", copied)
    try:
        findings = [_right(api, run, right, "rights on", install) for right in required]
        return [*findings, _right(api, run, copies, "rights to copy", f"{install} --copies")]
    except ApiError as error:
        message = f"cannot be checked: {one_line(error.message)}"
        remedy = "run it with an account that may create subjectaccessreviews"
        return [Finding("warn", "rights", message, remedy)]


def _right(api: Api, run: Requirements, right: Right, title: str, remedy: str) -> Finding:
    group, resource, verbs, required = right
    # Steps of a run as STEPS launch with the token of the other account.
    account = LAUNCHER if run.service_account == STEPS else run.service_account
    user = f"system:serviceaccount:{api.namespace}:{account}" if account else ""
    # Nodes have no namespace.
    scope = Api(api.client, "") if resource == "nodes" else api
    plural, _, sub = resource.partition("/")
    missing = [verb for verb in verbs.split() if not review(scope, verb, group, plural, sub, user)]
    what = f"{title} {resource}"
    if not missing:
        return Finding("ok", what, verbs.replace(" ", ", "))
    where = f" in {scope.namespace}" if scope.namespace else ""
    message = f"no right to {', '.join(missing)}{where}"
    return Finding("bad" if required else "warn", what, message, remedy)


def secret(cluster: CheckContext) -> list[Finding]:
    """Check the secret of the bucket; without one, steps use the credentials of their account."""
    api = cluster.api
    name = cluster.run.bucket_secret
    what = f"secret {name}"
    create = f"kubectl create secret generic -n {api.namespace} {name} --from-file={GOOGLE}"
    try:
        result = api.get(Resource("v1", "secrets"), name)
    except ApiError:
        return [Finding("warn", what, "may not be read", ASK_ADMIN)]
    if result is None:
        if name != Requirements.bucket_secret:
            return [Finding("bad", what, "does not exist", create)]
        message = "does not exist: buckets are accessed with the steps' account, or not at all"
        return [Finding("warn", what, message, f"if that is not enough, {create}")]
    data: Object = result.get("data") or {}
    if problem := _secret_problem(data):
        remedy = f"kubectl delete secret -n {api.namespace} {name}; {create}"
        return [Finding("bad", what, problem, remedy)]
    return [Finding("ok", what, f"has {', '.join(sorted(data))}")]


def _secret_problem(data: Object) -> str:
    """Return what is wrong with the base64 values of a secret; '' for nothing."""
    amazon = [key for key in AMAZON if data.get(key)]
    others = (GOOGLE, WEB, HUGGING_FACE, *AZURE)
    if not amazon and data.keys().isdisjoint(others):
        known = f"neither {GOOGLE} nor {AMAZON[0]} nor {AZURE[0]}"
        return f"has {', '.join(sorted(data)) or 'nothing'}, and {known}"
    if len(amazon) == 1:
        (missing,) = set(AMAZON) - set(amazon)
        return f"has {amazon[0]} without {missing}"
    if GOOGLE in data:
        return _google_problem(data[GOOGLE])
    return ""


def _google_problem(encoded: str) -> str:
    """Return what is wrong with the key of a service account; '' for nothing."""
    try:
        key = from_json(base64.b64decode(encoded))
    except (ValueError, binascii.Error):
        return f"its {GOOGLE} is not JSON"
    if not isinstance(key, dict) or "type" not in key:
        return f"its {GOOGLE} is not a key of a service account: it has no type"
    fields = sorted({"client_email", "private_key"} - key.keys())
    if key["type"] == "service_account" and fields:
        return f"its {GOOGLE} lacks {' and '.join(fields)}"
    return ""


QUOTAS = Resource("v1", "resourcequotas")
LEVEL = "pod-security.kubernetes.io/enforce"
IMAGE = "example.com/any:1"
HARDENED: Object = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
# Resources of KFP 2.17's init container, which copies its launcher into the pod of a step.
KFP_LAUNCHER = {"limits": {"cpu": "500m", "memory": "256Mi"}, "requests": {"cpu": "100m"}}
ARGO = "workflow-controller-configmap"
PODS_OF_KFP = 3
"""Pods beside the workers: a step, a driver, and a pod that has just ended."""
OF_KFP: Object = {
    "limits": {"cpu": "1", "memory": "1Gi"},
    "requests": {"cpu": "200m", "memory": "256Mi"},
}
"""What the containers of KFP and Argo take, of a step and of a driver beside it."""
UNITS = {"cpu": (1, ""), "memory": (1 << 30, "Gi")}


def admitted(cluster: CheckContext) -> list[Finding]:
    """Check by dry-run requests, as real ones are, the pods of the largest step and of a worker."""
    api = cluster.api
    run = cluster.run
    executor = _executor_resources(api)
    steps = StepResources()
    limits = {"cpu": steps.evaluate_cpu, "memory": steps.evaluate_memory}
    main = _container("main", {"limits": limits, "requests": EVALUATE_REQUESTS})
    step = {  # as KFP and Argo create it
        "initContainers": [_container("init", executor), _container("kfp-launcher", KFP_LAUNCHER)],
        "containers": [main, _container("wait", executor)],
    }
    findings = [_request(api, "pods of steps", step)]
    if run.backend != "local":
        findings.append(_request(api, "pods of workers", _worker(run)))
    return findings


def _worker(run: Requirements) -> Object:
    settings: dict[str, Any] = {"image": IMAGE, "nodes": run.nodes}
    if run.gpus_per_node > 0:
        settings |= {"gpus_per_node": run.gpus_per_node, "gpu_resource": run.gpu_resource}
    worker: Object = pod.template(LaunchSpec.create(**settings), {}, "pytorch")["spec"]
    return worker


def quota(cluster: CheckContext) -> list[Finding]:
    """Return the quota that one run needs: its training, or a step that computes if it is larger.

    Steps of a pipeline follow each other, but KFP starts a driver beside a step.
    """
    run = cluster.run
    steps = StepResources()
    limits = {"cpu": steps.evaluate_cpu, "memory": steps.evaluate_memory}
    computing: Object = {"limits": limits, "requests": EVALUATE_REQUESTS}
    (container,) = _worker(run)["containers"]
    nodes = 0 if run.backend == "local" else run.nodes
    hard: dict[str, object] = {"pods": nodes + PODS_OF_KFP}
    for part, name in itertools.product(("requests", "limits"), ("cpu", "memory")):
        workers = nodes * parse_quantity(container["resources"][part][name])
        training = workers + parse_quantity(LAUNCHER_REQUESTS[name])
        most = max(training, parse_quantity(computing[part][name]))
        unit, sign = UNITS[name]
        amount = math.ceil((most + parse_quantity(OF_KFP[part][name])) / unit)
        hard[f"{part}.{name}"] = f"{amount}{sign}"
    if run.gpus_per_node > 0:
        hard[f"requests.{run.gpu_resource}"] = nodes * run.gpus_per_node
    amounts = ",".join(f"{name}={amount}" for name, amount in hard.items())
    command = f"kubectl create quota kfp-ddp -n {cluster.api.namespace} --hard={amounts}"
    return [Finding("ok", "quota for one run", command)]


def _request(api: Api, what: str, spec: Object) -> Finding:
    metadata = {"generateName": "kfp-ddp-doctor-"}
    body = {"metadata": metadata, "spec": {"restartPolicy": "Never", **spec}}
    try:
        api.create(PODS, body, query={"dryRun": "All"})
    except ApiError as error:
        return _refused(api.namespace, what, error)
    rules = _rules(api)
    by = f", by {' and '.join(rules)}" if rules else ""
    return Finding("ok", what, f"are admitted{by}")


def _rules(api: Api) -> list[str]:
    """Return the PodSecurity level and the quotas that a pod has to keep to."""
    rules = []
    level = enforced(api)
    if level:
        how = " (of kfp-ddp compile --restricted)" if level == "restricted" else ""
        rules.append(f"PodSecurity {level}{how}")
    quotas = items(api, QUOTAS) or []
    rules += [f"quota {quota['metadata']['name']}" for quota in quotas]
    return rules


def _refused(namespace: str, what: str, error: ApiError) -> Finding:
    reason = error.message
    if "cannot create resource" in reason:
        remedy = "run it with an account that may create pods"
        return Finding("warn", what, "cannot be checked", remedy)
    rule = reason.partition("is forbidden: ")[2] or reason
    return Finding("bad", what, f"are refused: {one_line(rule)}", _remedy(namespace, reason))


def _remedy(namespace: str, reason: str) -> str:
    """Return what to do where the server refuses a pod for this reason."""
    if "violates PodSecurity" in reason:
        return f"kubectl label namespace {namespace} {LEVEL}=baseline --overwrite"
    if "failed quota" in reason:  # a container without resources, such as Argo's
        return f"kubectl apply -n {namespace} -f deploy/quota/limitrange.yaml"
    if "exceeded quota" in reason:
        return "raise that quota"
    if "service account" in reason or "serviceaccount" in reason:
        return f"create that account in {namespace}"
    return "ask the owner of that rule to admit it"


def enforced(api: Api) -> str:
    """Return the enforced PodSecurity level; '' if the namespace may not be read."""
    try:
        namespace = api.get(NAMESPACES, api.namespace)
    except ApiError:
        return ""
    if namespace is None:
        return ""
    return label(namespace, LEVEL) or "privileged"


def _container(name: str, resources: Object) -> Object:
    container: Object = {"name": name, "image": IMAGE, "securityContext": HARDENED}
    if resources:
        container["resources"] = resources
    return container


def _executor_resources(api: Api) -> Object:
    """Return the resources of Argo's own containers; {} if unset or not readable."""
    for namespace in dict.fromkeys((api.namespace, "kubeflow", "argo")):
        try:
            config = api.call("GET", CONFIG_MAPS.path(namespace, ARGO))
            data = config.get("data") or {}
            executor = yaml_of(data.get("executor", "")) or {}
        except (ApiError, InputError):
            continue
        return dict(executor.get("resources") or {})
    return {}
