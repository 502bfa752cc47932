"""The queues of Kueue and Volcano that a job can be put into."""

from kfp_ddp.checks.doctor.finding import ASK_ADMIN, Finding
from kfp_ddp.jobs import kueue
from kfp_ddp.k8s.api import Api, ApiError, Object

VOLCANO = "/apis/scheduling.volcano.sh/v1beta1/queues"


def queues(api: Api) -> list[Finding]:
    """Queues of Kueue and Volcano, where they are installed."""
    found = []
    for title in ("Kueue", "Volcano"):
        try:
            path = kueue.path(api, "localqueues") if title == "Kueue" else VOLCANO
            items = api.call("GET", path)["items"] if path else None
        except ApiError as error:
            if error.status != 404:
                found.append(Finding("warn", f"queues of {title}", "may not be listed", ASK_ADMIN))
            continue
        if items is not None:
            found.append(_queues_of(title, items, api.namespace))
    return found


def _queues_of(title: str, items: list[Object], namespace: str) -> Finding:
    troubles = {item["metadata"]["name"]: kueue.inactive(item) for item in items}
    said = ", ".join(name + (f" ({why})" if why else "") for name, why in troubles.items())
    what = f"queues of {title}"
    if not items:
        remedy = f"make a LocalQueue in {namespace}" if title == "Kueue" else "make a Queue"
        return Finding("warn", what, "there are none", remedy)
    if any(troubles.values()):
        remedy = "kubectl describe localqueues and its ClusterQueue"
        return Finding("warn", what, said, remedy)
    return Finding("ok", what, said)
