"""Check operators, gang scheduling, queues and KServe."""

import contextlib
from collections.abc import Mapping
from typing import Any

from kfp_ddp.checks.finding import ASK_ADMIN, CheckContext, Finding, State, items
from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs import kueue
from kfp_ddp.jobs.gangs import GANGS, QUEUES, gang_scheduling
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
    api, findings = cluster.api, []
    for name, kind in KINDS.items():
        resource, versions, served = kind.resource, [], []
        with contextlib.suppress(ApiError):
            versions = api.call("GET", f"/apis/{resource.group}")["versions"]
            served = api.call("GET", f"/apis/{resource.group_version}")["resources"]
        remedy = f"install {kind.operator}"
        if all(one["name"] != resource.plural for one in served):
            problem = f"{resource.plural}.{resource.group_version} is not served"
        elif not (problem := _old(api, kind)) and (problem := _stopped(api, kind)):
            remedy = f"kubectl describe deployments -A -l {kind.operator_selector}"
        if problem:
            state: State = "bad" if name == cluster.run.backend else "warn"
            findings.append(Finding(state, kind.title, problem, remedy))
        else:
            listed = ", ".join(item["version"] for item in versions)
            findings.append(Finding("ok", kind.title, f"{resource.group}/{listed}"))
    return findings


def _old(api: Api, kind: Kind) -> str:
    """Return the message for an operator whose jobs lack a required field; '' if none."""
    if not kind.newest_field:
        return ""
    try:
        path = f"/openapi/v3/apis/{kind.resource.group_version}"
        schemas = api.call("GET", path)["components"]["schemas"]
    except (ApiError, KeyError):
        return ""
    schema: Object = next((schemas[key] for key in schemas if key.endswith(f".{kind.title}")), {})
    part: Object = schema.get("properties", {}).get("spec", {})
    for field in kind.newest_field:
        part = part.get("items", part).get("properties", {}).get(field, {})
    missing = ".".join(("spec", *kind.newest_field))
    return "" if part or not schema else f"is older: its jobs have no {missing}"


def _stopped(api: Api, kind: Kind) -> str:
    """Return the message for an operator without running pods; '' if none."""
    deployments = items(api, DEPLOYMENTS, kind.operator_selector) or []
    if not deployments or any(item["status"].get("availableReplicas") for item in deployments):
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
    problem, _, remedy = gang_scheduling(cluster.api, spec).rpartition("; ")
    state: State = "bad" if problem else "ok"
    return [Finding(state, what, problem or "PodGroups are served", remedy)]


def queues(cluster: CheckContext) -> list[Finding]:
    """Report the queues of Kueue and Volcano, where they are installed."""
    api, findings = cluster.api, []
    for title in ("Kueue", "Volcano"):
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
        problems = {item["metadata"]["name"]: kueue.inactive(item) for item in objects}
        message = ", ".join(name + (f" ({why})" if why else "") for name, why in problems.items())
        remedy = "kubectl describe localqueues and its ClusterQueue" * any(problems.values())
        if not objects:
            create = {"Kueue": f"a LocalQueue in {api.namespace}", "Volcano": "a Queue"}
            message, remedy = "none exist", f"create {create[title]}"
        findings.append(Finding("warn" if remedy else "ok", what, message, remedy))
    return findings


def kserve(cluster: CheckContext) -> list[Finding]:
    """Check that KServe is installed, and that an existing service is ours."""
    name = cluster.run.service
    if not name:
        return []
    try:
        exists = Service(cluster.api, name).find()
    except InputError as error:
        message, _, remedy = str(error).partition("; ")
        return [Finding("bad", "KServe", message, remedy)]
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
