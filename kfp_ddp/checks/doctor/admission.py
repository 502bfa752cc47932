"""Whether the namespace takes the pods of a run: PodSecurity, quotas, webhooks.

The server is asked to create such pods without doing it, so it answers by its own rules.
"""

from typing import Any

from kfp_ddp.checks.doctor.finding import Asked, Finding, items
from kfp_ddp.checks.preflight.parameters import EVALUATE_ASKS, StepResources
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
# What KFP 2.17 gives the container that brings its launcher into the pod of a step.
LAUNCHER = {"limits": {"cpu": "500m", "memory": "256Mi"}, "requests": {"cpu": "100m"}}
ARGO = "workflow-controller-configmap"


def admitted(api: Api, asked: Asked) -> list[Finding]:
    """One finding for the pod of the step that takes the most, and one for a worker's."""
    found = [_asked_for(api, "pods of steps", _step(_executor_resources(api)))]
    if asked.backend != "local":
        found.append(_asked_for(api, "pods of workers", _worker(asked)))
    return found


def _asked_for(api: Api, what: str, body: Object) -> Finding:
    try:
        api.call("POST", core(api.namespace, "pods"), body, {"dryRun": "All"})
    except ApiError as error:
        return _refused(api.namespace, what, error)
    return Finding("ok", what, f"are taken{_rules(api)}")


def _refused(namespace: str, what: str, error: ApiError) -> Finding:
    message = error.message
    if "cannot create resource" in message:
        return Finding("warn", what, "may not be tried", "run it as somebody who may create pods")
    said = f"are refused: {one_line(message.partition('is forbidden: ')[2] or message)}"
    if "violates PodSecurity" in message:
        remedy = f"kubectl label namespace {namespace} {LEVEL}=baseline --overwrite"
    elif "failed quota" in message:  # of which a container says nothing, as Argo's do not
        remedy = f"kubectl apply -n {namespace} -f deploy/quota/limitrange.yaml"
    elif "exceeded quota" in message:
        remedy = "raise that quota"
    elif "service account" in message or "serviceaccount" in message:
        remedy = f"make that account in {namespace}"
    else:
        remedy = "let who runs that rule admit it"
    return Finding("bad", what, said, remedy)


def _rules(api: Api) -> str:
    """The level and the quotas by which pods were judged, in words."""
    rules = []
    if level := enforced(api):
        how = " (of kfp-ddp compile --restricted)" if level == "restricted" else ""
        rules.append(f"PodSecurity {level}{how}")
    quotas = items(api, core(api.namespace, "resourcequotas")) or []
    rules += [f"quota {each['metadata']['name']}" for each in quotas]
    return f", by {' and '.join(rules)}" if rules else ""


def enforced(api: Api) -> str:
    """The level of PodSecurity that the namespace enforces; '' where its labels are not seen."""
    try:
        namespace = api.call("GET", f"/api/v1/namespaces/{api.namespace}")
    except ApiError:
        return ""
    return label(namespace, LEVEL) or "privileged"


def _step(executor: Object) -> Object:
    """The pod that KFP and Argo make of the step that takes the most."""
    steps = StepResources()
    most = {"cpu": steps.evaluate_cpu, "memory": steps.evaluate_memory}
    main = _container("main", {"limits": most, "requests": EVALUATE_ASKS})
    return _pod(
        initContainers=[_container("init", executor), _container("kfp-launcher", LAUNCHER)],
        containers=[main, _container("wait", executor)],
    )


def _worker(asked: Asked) -> Object:
    given: dict[str, Any] = {"image": IMAGE, "nodes": asked.nodes}
    if asked.gpus_per_node > 0:
        given |= {"gpus_per_node": asked.gpus_per_node, "gpu_resource": asked.gpu_resource}
    return _pod(**pod.template(LaunchSpec.create(**given), {}, "pytorch")["spec"])


def _pod(**spec: Any) -> Object:
    metadata = {"generateName": "kfp-ddp-doctor-"}
    return {"metadata": metadata, "spec": {"restartPolicy": "Never", **spec}}


def _container(name: str, resources: Object) -> Object:
    found = {"name": name, "image": IMAGE, "securityContext": HARDENED}
    return found | ({"resources": resources} if resources else {})


def _executor_resources(api: Api) -> Object:
    """What Argo gives its own containers, nothing if it was not told; {} where it is not seen."""
    import yaml

    for namespace in dict.fromkeys((api.namespace, "kubeflow", "argo")):
        try:
            found = api.call("GET", core(namespace, "configmaps", ARGO))
            executor = yaml.safe_load((found.get("data") or {}).get("executor", "")) or {}
        except (ApiError, yaml.YAMLError):
            continue
        return dict(executor.get("resources") or {})
    return {}
