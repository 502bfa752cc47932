"""Check operators, gang scheduling, queues and KServe."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from kfp_ddp.checks.finding import ASK_ADMIN, CheckContext, Finding, State, items
from kfp_ddp.core.errors import InputError, Problem
from kfp_ddp.jobs import kueue
from kfp_ddp.jobs.gangs import GANGS, QUEUES, gang_problem
from kfp_ddp.jobs.kinds import KINDS, Kind
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Api, ApiError, Object, require
from kfp_ddp.k8s.resource import Resource
from kfp_ddp.models.inference_service import API_VERSION, storage_uri
from kfp_ddp.models.release import Deployment, part_of
from kfp_ddp.rollout.rollout import SERVICES, Service, check_kserve

DEPLOYMENTS = Resource("apps/v1", "deployments", namespaced=False)
"""Of all namespaces."""
SERVICE_VERBS = ("get", "list", "watch", "create", "patch")


def operators(cluster: CheckContext) -> list[Finding]:
    """Check the operator of each kind of job; a problem of the run's backend is bad."""
    findings = []
    for name, kind in KINDS.items():
        versions, served = _served(cluster.api, kind)
        problem = _operator_problem(cluster.api, kind, served)
        if problem is not None:
            state: State = "bad" if name == cluster.run.backend else "warn"
            findings.append(Finding(state, kind.title, problem.what, problem.remedy))
        else:
            listed = ", ".join(versions)
            message = f"{kind.resource.group}/{listed}"
            findings.append(Finding("ok", kind.title, message))
    return findings


def _served(api: Api, kind: Kind) -> tuple[list[str], set[str]]:
    """Return the served versions of a kind's group, and the resources of the version in use."""
    versions: list[str] = []
    resources: set[str] = set()
    with contextlib.suppress(ApiError):
        group = api.call("GET", f"/apis/{kind.resource.group}")
        versions = [version["version"] for version in group["versions"]]
        version = api.call("GET", f"/apis/{kind.resource.group_version}")
        resources = {resource["name"] for resource in version["resources"]}
    return versions, resources


def _operator_problem(api: Api, kind: Kind, served: set[str]) -> Problem | None:
    """Return why an operator cannot run jobs; None if it can."""
    resource = kind.resource
    install = f"install {kind.operator}"
    if resource.plural not in served:
        return Problem(f"{resource.plural}.{resource.group_version} is not served", install)
    if old := _old(api, kind):
        return Problem(old, install)
    if stopped := _stopped(api, kind):
        return Problem(stopped, f"kubectl describe deployments -A -l {kind.operator_selector}")
    return None


def _old(api: Api, kind: Kind) -> str:
    """Return the message for an operator whose jobs lack a required field; '' if none."""
    if not kind.newest_field:
        return ""
    try:
        path = f"/openapi/v3/apis/{kind.resource.group_version}"
        schemas = api.call("GET", path)["components"]["schemas"]
    except (ApiError, KeyError):
        return ""
    own = (schemas[key] for key in schemas if key.endswith(f".{kind.title}"))
    schema: Object = next(own, {})
    part: Object = schema.get("properties", {}).get("spec", {})
    for field in kind.newest_field:
        part = part.get("items", part)  # of a list
        part = part.get("properties", {}).get(field, {})
    if part or not schema:
        return ""
    missing = ".".join(("spec", *kind.newest_field))
    return f"is older: its jobs have no {missing}"


def _stopped(api: Api, kind: Kind) -> str:
    """Return the message for an operator without running pods; '' if none."""
    deployments = items(api, DEPLOYMENTS, kind.operator_selector) or []
    if not deployments:
        return ""
    if any(item["status"].get("availableReplicas") for item in deployments):
        return ""
    metadata = deployments[0]["metadata"]
    return f"{metadata['namespace']}/{metadata['name']} is not running"


def gangs(cluster: CheckContext) -> list[Finding]:
    """Check that the requested scheduler starts the pods of a job together."""
    run = cluster.run
    if run.scheduler not in GANGS:
        return []
    spec = LaunchSpec.create(image="any", nodes=run.nodes, scheduler=run.scheduler)
    what = f"gangs of {GANGS[run.scheduler].title}"
    problem = gang_problem(cluster.api, spec)
    if problem is not None:
        return [Finding("bad", what, problem.what, problem.remedy)]
    return [Finding("ok", what, "PodGroups are served")]


def queues(cluster: CheckContext) -> list[Finding]:
    """Report the queues of Kueue and Volcano, where they are installed."""
    api = cluster.api
    create = {"Kueue": f"a LocalQueue in {api.namespace}", "Volcano": "a Queue"}
    findings = []
    for title in create:
        what = f"queues of {title}"
        try:
            resource = kueue.resource(api, "localqueues") if title == "Kueue" else QUEUES
            objects = api.list_objects(resource) if resource else None
        except ApiError as error:
            if error.status != 404:
                findings.append(Finding("warn", what, "may not be listed", ASK_ADMIN))
            continue
        if objects is None:
            continue
        if objects:
            findings.append(_queue_finding(what, objects))
        else:
            findings.append(Finding("warn", what, "none exist", f"create {create[title]}"))
    return findings


def _queue_finding(what: str, queues: Sequence[Object]) -> Finding:
    """List queues, with why they admit no job."""
    reasons = {queue["metadata"]["name"]: kueue.inactive(queue) for queue in queues}
    names = [f"{name} ({reason})" if reason else name for name, reason in reasons.items()]
    message = ", ".join(names)
    if any(reasons.values()):
        remedy = "kubectl describe localqueues and its ClusterQueue"
        return Finding("warn", what, message, remedy)
    return Finding("ok", what, message)


def kserve(cluster: CheckContext) -> list[Finding]:
    """Check that KServe is installed, and that an existing service is ours."""
    name = cluster.run.service
    if not name:
        return []
    try:
        exists = Service(cluster.api, name).find()
    except InputError as error:
        problem = error.problem
        return [Finding("bad", "KServe", problem.what, problem.remedy)]
    state = "exists" if exists else "will be created"
    return [Finding("ok", "KServe", f"{API_VERSION}, {name} {state}")]


def check_service(release: Mapping[str, Any], destination: str) -> str:
    """Return the service that `release` names, '' for none; InputError if it is not usable."""
    name = part_of(release, Deployment).service
    if not name:
        return ""
    if not destination:
        raise InputError(
            f"release names the service {name}, and no destination: KServe serves models from a "
            "bucket, so give destination too"
        )
    storage_uri(f"{destination}/model")
    api = Api.connect()
    check_kserve(api)
    require(api, SERVICES, *SERVICE_VERBS)
    Service(api, name).find()
    return name
