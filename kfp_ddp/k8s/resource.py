"""The resources of the Kubernetes API server that are used in several places."""

from typing import NamedTuple


class Resource(NamedTuple):
    """A resource; `group_version` is such as v1 or apps/v1."""

    group_version: str
    plural: str
    namespaced: bool = True
    """Whether to ask for the objects of one namespace."""
    role: str = "deploy/rbac"
    """The folder with the role that grants the rights to it; '' for none."""

    @property
    def group(self) -> str:
        """The API group; '' for the core group."""
        return self.group_version.rpartition("/")[0]

    def place(self, namespace: str) -> str:
        """Return where the objects are, as text."""
        return f"in namespace {namespace}" if self.namespaced else "of the cluster"

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of the objects in a namespace, or of one."""
        root = "/apis" if self.group else "/api"
        scope = f"/namespaces/{namespace}" if self.namespaced else ""
        return f"{root}/{self.group_version}{scope}/{self.plural}" + (f"/{name}" if name else "")


PODS = Resource("v1", "pods")
EVENTS = Resource("v1", "events")
CLAIMS = Resource("v1", "persistentvolumeclaims")
CONFIG_MAPS = Resource("v1", "configmaps")
JOBS = Resource("batch/v1", "jobs")
NODES = Resource("v1", "nodes", namespaced=False, role="deploy/rbac/nodes")
NAMESPACES = Resource("v1", "namespaces", namespaced=False)
STORAGE_CLASSES = Resource(
    "storage.k8s.io/v1", "storageclasses", namespaced=False, role="deploy/storage"
)
WORKFLOWS = Resource("argoproj.io/v1alpha1", "workflows")
