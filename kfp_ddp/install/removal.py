"""Delete what installations of any version made in a namespace."""

from collections.abc import Iterator

from kfp_ddp.core.text import one_line
from kfp_ddp.install.apply import Done, resource_of
from kfp_ddp.install.manifests import PART_OF, Installation, every_object
from kfp_ddp.jobs.shipping.own_package import MAPS
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.k8s.resource import CONFIG_MAPS, Resource

OURS = "app.kubernetes.io/part-of=kfp-ddp"
BINDINGS = Resource("rbac.authorization.k8s.io/v1", "clusterrolebindings", namespaced=False)


def remove(api: Api, target: Installation, *, dry_run: bool = False) -> list[Done]:
    """Delete all that an installation may have made, and only the PVCs that `target` names."""
    return [_delete(api, one, dry_run=dry_run) for one in _existing(api, target)]


def _existing(api: Api, target: Installation) -> Iterator[Object]:
    for one in every_object(target):
        if existing := api.get(resource_of(one), one["metadata"]["name"]):
            yield {**one, **existing}
    for found in api.list_objects(CONFIG_MAPS, {"labelSelector": OURS}):
        if found["metadata"]["name"].startswith(MAPS):
            yield {"apiVersion": "v1", "kind": "ConfigMap", **found}


def _delete(api: Api, existing: Object, *, dry_run: bool) -> Done:
    kind = existing["kind"]
    name = existing["metadata"]["name"]
    if not PART_OF.items() <= existing["metadata"].get("labels", {}).items():
        return Done(kind, name, "left", "it is not labelled as a part of kfp-ddp")
    try:
        if kind == "ClusterRole" and (others := _others(api, name)):
            return Done(kind, name, "left", f"{others[0]} needs it")
        api.delete(resource_of(existing), name, dry_run=dry_run)
    except ApiError as error:
        return Done(kind, name, "refused", one_line(error.message))
    return Done(kind, name, "deleted")


def _others(api: Api, role: str) -> list[str]:
    """Return the bindings of a role for other namespaces."""
    names = {item["metadata"]["name"] for item in api.list_objects(BINDINGS)}
    others = names - {f"{role}.{api.namespace}"}
    return sorted(name for name in others if name.startswith(f"{role}."))
