"""The operators that make pods of jobs: served, new enough, running, and starting gangs."""

from kfp_ddp.checks.doctor.finding import Asked, Finding, items
from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.check_job import gang_scheduling
from kfp_ddp.jobs.gang import GANGS
from kfp_ddp.jobs.kinds import KINDS, Kind
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.models.serving.inference_service import API_VERSION
from kfp_ddp.models.serving.rollout import Service


def operators(api: Api, asked: Asked) -> list[Finding]:
    """One finding for each kind of job; what the run's backend needs is bad where it is missing."""
    found = []
    for name, kind in KINDS.items():
        said = _served(api, kind)
        trouble = "" if said else f"{kind.plural}.{kind.group_version} is not served"
        trouble = trouble or _old(api, kind) or _stopped(api, kind)
        if not trouble:
            found.append(Finding("ok", kind.title, said))
            continue
        remedy = f"install {kind.operator}"
        if trouble.endswith("not running"):
            remedy = f"kubectl describe deployments -A -l {kind.operator_selector}"
        needed = name == asked.backend
        found.append(Finding("bad" if needed else "warn", kind.title, trouble, remedy))
    return found


def _served(api: Api, kind: Kind) -> str:
    """The versions of a kind's group, where the group serves the kind; otherwise ''."""
    try:
        versions = [each["version"] for each in api.call("GET", f"/apis/{kind.group}")["versions"]]
        names = api.call("GET", f"/apis/{kind.group_version}")["resources"]
    except ApiError:
        return ""
    there = any(each["name"] == kind.plural for each in names)
    return f"{kind.group}/{', '.join(versions)}" if there else ""


def _old(api: Api, kind: Kind) -> str:
    """That the operator is older than the one that is needed, by what its jobs lack; '' if not."""
    if not kind.newest_field:
        return ""
    try:
        schemas = api.call("GET", f"/openapi/v3/apis/{kind.group_version}")["components"]["schemas"]
    except (ApiError, KeyError):
        return ""
    schema: Object = next((schemas[key] for key in schemas if key.endswith(f".{kind.title}")), {})
    part: Object = schema.get("properties", {}).get("spec", {})
    for field in kind.newest_field:
        part = part.get("properties", {}).get(field, {})
    lacks = ".".join(("spec", *kind.newest_field))
    return "" if part or not schema else f"is older: its jobs have no {lacks}"


def _stopped(api: Api, kind: Kind) -> str:
    """That the operator is there and does not run; '' where it does, or cannot be seen."""
    there = items(api, "/apis/apps/v1/deployments", kind.operator_selector) or []
    if not there or any(each["status"].get("availableReplicas") for each in there):
        return ""
    return f"{there[0]['metadata']['namespace']}/{there[0]['metadata']['name']} is not running"


def kserve(api: Api, asked: Asked) -> list[Finding]:
    """Whether there are InferenceServices, where a service is asked for, and that it is ours."""
    if not asked.service:
        return []
    try:
        found = Service(api, asked.service).find()
    except InputError as error:
        said, _, remedy = str(error).partition("; ")
        return [Finding("bad", "KServe", said, remedy)]
    there = "is there" if found else "will be made"
    return [Finding("ok", "KServe", f"{API_VERSION}, {asked.service} {there}")]


def gangs(api: Api, asked: Asked) -> list[Finding]:
    """Whether the pods of a job start together, for the scheduler that is asked for."""
    if asked.scheduler not in GANGS:
        return []
    spec = LaunchSpec.create(image="any", nodes=asked.nodes, scheduler=asked.scheduler)
    what = f"gangs of {GANGS[asked.scheduler].title}"
    if problem := gang_scheduling(api, spec):
        said, _, remedy = problem.rpartition("; ")
        return [Finding("bad", what, said, remedy)]
    return [Finding("ok", what, "the pods of a job start together")]
