"""Check with dry-run requests that the namespace admits the pods of a run.

PodSecurity, quotas and webhooks answer such requests as they do real ones.
"""

from typing import Any

from kfp_ddp.checks.finding import Cluster, Finding, Requirements, items
from kfp_ddp.checks.form import EVALUATE_ASKS, StepResources
from kfp_ddp.core.text import one_line
from kfp_ddp.jobs.kinds import pod
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Api, ApiError, Object, core
from kfp_ddp.k8s.objects import label

LEVEL = "pod-security.kubernetes.io/enforce"
IMAGE = "example.com/any:1"
HARDENED: Object = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
# Resources of KFP 2.17's init container, which copies its launcher into the pod of a step.
LAUNCHER = {"limits": {"cpu": "500m", "memory": "256Mi"}, "requests": {"cpu": "100m"}}
ARGO = "workflow-controller-configmap"


def admitted(cluster: Cluster) -> list[Finding]:
    """Check the pod of the largest step, and that of a worker."""
    api = cluster.api
    findings = [_request(api, "pods of steps", _step(_executor_resources(api)))]
    if cluster.run.backend != "local":
        findings.append(_request(api, "pods of workers", _worker(cluster.run)))
    return findings


def _request(api: Api, what: str, body: Object) -> Finding:
    try:
        api.call("POST", core(api.namespace, "pods"), body, {"dryRun": "All"})
    except ApiError as error:
        return _refused(api.namespace, what, error)
    return Finding("ok", what, f"are admitted{_rules(api)}")


def _refused(namespace: str, what: str, error: ApiError) -> Finding:
    reason = error.message
    if "cannot create resource" in reason:
        remedy = "run it with an account that may create pods"
        return Finding("warn", what, "cannot be checked", remedy)
    message = f"are refused: {one_line(reason.partition('is forbidden: ')[2] or reason)}"
    if "violates PodSecurity" in reason:
        remedy = f"kubectl label namespace {namespace} {LEVEL}=baseline --overwrite"
    elif "failed quota" in reason:  # a container without resources, such as Argo's
        remedy = f"kubectl apply -n {namespace} -f deploy/quota/limitrange.yaml"
    elif "exceeded quota" in reason:
        remedy = "raise that quota"
    elif "service account" in reason or "serviceaccount" in reason:
        remedy = f"create that account in {namespace}"
    else:
        remedy = "ask the owner of that rule to admit it"
    return Finding("bad", what, message, remedy)


def _rules(api: Api) -> str:
    """Return the PodSecurity level and the quotas of the namespace as text."""
    rules = []
    if level := enforced(api):
        how = " (of kfp-ddp compile --restricted)" if level == "restricted" else ""
        rules.append(f"PodSecurity {level}{how}")
    quotas = items(api, core(api.namespace, "resourcequotas")) or []
    rules += [f"quota {quota['metadata']['name']}" for quota in quotas]
    return f", by {' and '.join(rules)}" if rules else ""


def enforced(api: Api) -> str:
    """Return the enforced PodSecurity level; '' if the namespace may not be read."""
    try:
        namespace = api.call("GET", f"/api/v1/namespaces/{api.namespace}")
    except ApiError:
        return ""
    return label(namespace, LEVEL) or "privileged"


def _step(executor: Object) -> Object:
    """Return the pod that KFP and Argo create for the largest step."""
    steps = StepResources()
    limits = {"cpu": steps.evaluate_cpu, "memory": steps.evaluate_memory}
    main = _container("main", {"limits": limits, "requests": EVALUATE_ASKS})
    return _pod(
        initContainers=[_container("init", executor), _container("kfp-launcher", LAUNCHER)],
        containers=[main, _container("wait", executor)],
    )


def _worker(run: Requirements) -> Object:
    settings: dict[str, Any] = {"image": IMAGE, "nodes": run.nodes}
    if run.gpus_per_node > 0:
        settings |= {"gpus_per_node": run.gpus_per_node, "gpu_resource": run.gpu_resource}
    return _pod(**pod.template(LaunchSpec.create(**settings), {}, "pytorch")["spec"])


def _pod(**spec: Any) -> Object:
    metadata = {"generateName": "kfp-ddp-doctor-"}
    return {"metadata": metadata, "spec": {"restartPolicy": "Never", **spec}}


def _container(name: str, resources: Object) -> Object:
    container = {"name": name, "image": IMAGE, "securityContext": HARDENED}
    return container | ({"resources": resources} if resources else {})


def _executor_resources(api: Api) -> Object:
    """Return the resources of Argo's own containers; {} if unset or not readable."""
    import yaml

    for namespace in dict.fromkeys((api.namespace, "kubeflow", "argo")):
        try:
            config = api.call("GET", core(namespace, "configmaps", ARGO))
            executor = yaml.safe_load((config.get("data") or {}).get("executor", "")) or {}
        except (ApiError, yaml.YAMLError):
            continue
        return dict(executor.get("resources") or {})
    return {}
