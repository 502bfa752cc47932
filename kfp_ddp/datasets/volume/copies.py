"""ReadOnlyMany claims: copied by the storage from the staging claim, or filled from the bucket."""

import time
from pathlib import PurePosixPath

from kfp_ddp.core.errors import StorageError
from kfp_ddp.datasets.volume.cluster import GCP_SOURCES, SNAPSHOTS, Cluster, Refused
from kfp_ddp.datasets.volume.request import DOMAIN, Published, Request
from kfp_ddp.k8s.api import Object
from kfp_ddp.storage.http.origin import display

SELECTED_NODE = "volume.kubernetes.io/selected-node"
_POLL = 1.0
_LASTING = 30.0


def copy(cluster: Cluster, request: Request, staging: Object, strategy: str) -> Published:
    """A ReadOnlyMany claim restored from a snapshot, or cloned, of the staging claim."""
    notes = []
    found = _reusable(cluster, request, strategy)
    if found is None:
        _writers_gone(cluster, request)
        notes += _detached(cluster, request, staging)
        if strategy == "snapshot":
            _snapshot(cluster, request)
            source = {"apiGroup": SNAPSHOTS[0], "kind": "VolumeSnapshot", "name": request.name}
        else:
            source = {"kind": "PersistentVolumeClaim", "name": request.claim}
        found = cluster.create_claim(_claim(request, staging, {"dataSource": source}, strategy))
        notes.append(f"made {request.name} as a {strategy} of {request.claim}")
    else:
        notes.append(f"{request.name} was there already, of this digest: used again")
    notes.append(_bound(cluster, request, staging, found))
    return Published(request.name, request.path, strategy, notes)


def populator(cluster: Cluster, request: Request, staging: Object) -> Published:
    """A claim that GKE's volume populator fills straight from the bucket.

    The bucket's prefix becomes the root of the claim; the digest is that of the listing, and
    what the populator copies is not verified.
    """
    found = _reusable(cluster, request, "populator")
    if found is None:
        spec = {
            "cloudStorage": {
                "uri": request.source.rstrip("/") + "/",
                "serviceAccountName": request.populator_account or "default",
            }
        }
        cluster.create_custom(
            GCP_SOURCES,
            {
                "apiVersion": f"{GCP_SOURCES[0]}/{GCP_SOURCES[1]}",
                "kind": "GCPDataSource",
                "metadata": {"name": request.name, "labels": request.labels},
                "spec": spec,
            },
        )
        source = {"apiGroup": GCP_SOURCES[0], "kind": "GCPDataSource", "name": request.name}
        cluster.create_claim(_claim(request, staging, {"dataSourceRef": source}, "populator"))
    root = str(PurePosixPath(request.path).parents[1])
    note = f"{request.name} is filled from {request.source} when a pod first uses it, unverified"
    return Published(request.name, root, "populator", [note])


def _reusable(cluster: Cluster, request: Request, strategy: str) -> Object | None:
    """The published claim if it is there and right, held; waits for one that is being deleted."""
    deadline = time.monotonic() + request.wait_seconds
    while (found := _held(cluster, request)) is not None:
        leaving = "deletionTimestamp" in found["metadata"]
        if found["status"].get("phase") == "Lost" and not leaving:
            cluster.delete_claim(request.name)
        elif not leaving:
            break
        if time.monotonic() > deadline:
            raise StorageError(
                f"claim {request.name} is being deleted and {request.wait_seconds:.0f} s were not "
                "enough; end the pods that use it: "
                f"{', '.join(cluster.users(request.name)) or 'none seen'}"
            )
        time.sleep(_POLL)
    if found is None:
        return None
    notes = found["metadata"].get("annotations", {})
    # A populated claim has the dataset at its root, a copied one below versions/.
    before = notes.get(f"{DOMAIN}/strategy", strategy)
    if (before == "populator") != (strategy == "populator"):
        raise StorageError(
            f"claim {request.name} was published with publish={before}, which lays its files out "
            f"in another way than {strategy}; delete it"
        )
    modes = found["spec"]["accessModes"]
    if notes.get(f"{DOMAIN}/digest") != request.digest or modes != ["ReadOnlyMany"]:
        raise StorageError(
            f"claim {request.name} exists and is not a ReadOnlyMany claim of this digest; delete it"
        )
    return found


def _held(cluster: Cluster, request: Request) -> Object | None:
    """The published claim if it is there, with the lease of the run.

    First the lease, then the look: a claim that is collected meanwhile is seen to be leaving.
    """
    found = cluster.claim(request.name)
    if found is None or not request.lease or "deletionTimestamp" in found["metadata"]:
        return found
    return cluster.label_claim(request.name, {"annotations": request.lease}) or None


def _writers_gone(cluster: Cluster, request: Request) -> None:
    """Wait until nobody has the staging claim mounted for writing.

    A copy of a mounted ext4 has a journal to replay, which a read-only mount cannot do.
    """
    deadline = time.monotonic() + request.wait_seconds
    told: list[str] = []
    while users := cluster.users(request.claim, writing=True):
        if users != told:
            print(f"claim {request.claim} is mounted by {', '.join(users)}; waiting", flush=True)
            told = users
        if time.monotonic() > deadline:
            raise StorageError(
                f"claim {request.claim} is still mounted by {', '.join(users)} after "
                f"{request.wait_seconds:.0f} s; end them, or use publish=in-place"
            )
        time.sleep(_POLL)


def _detached(cluster: Cluster, request: Request, staging: Object) -> list[str]:
    """Wait until the volume is unmounted, which its node does a while after the pod has ended.

    Returns a note where that cannot be seen. Shared file systems need no such wait.
    """
    volume = staging["spec"].get("volumeName")
    if not volume or "ReadWriteMany" in staging["spec"]["accessModes"]:
        return []
    deadline = time.monotonic() + request.wait_seconds
    try:
        while nodes := cluster.attached(volume):
            if time.monotonic() > deadline:
                raise StorageError(
                    f"the volume of claim {request.claim} is still attached to "
                    f"{', '.join(nodes)} after {request.wait_seconds:.0f} s; end the pods that "
                    "mount it, readers too, or use publish=in-place"
                )
            time.sleep(_POLL)
    except Refused as error:
        return [f"whether the volume was unmounted cannot be seen ({error}; deploy/storage)"]
    return []


def _snapshot(cluster: Cluster, request: Request) -> None:
    """Get or make the snapshot, and wait until it can be restored."""
    spec: Object = {"source": {"persistentVolumeClaimName": request.claim}}
    if request.snapshot_class:
        spec["volumeSnapshotClassName"] = request.snapshot_class
    body = {
        "apiVersion": f"{SNAPSHOTS[0]}/{SNAPSHOTS[1]}",
        "kind": "VolumeSnapshot",
        "metadata": {
            "name": request.name,
            "labels": request.labels,
            "annotations": {f"{DOMAIN}/digest": request.digest},
        },
        "spec": spec,
    }
    well = time.monotonic()
    deadline = well + request.wait_seconds
    while True:
        found = cluster.custom(SNAPSHOTS, request.name)
        if found is None:
            cluster.create_custom(SNAPSHOTS, body)
        leaving = found is not None and "deletionTimestamp" in found["metadata"]
        status = {} if leaving else (found or {}).get("status") or {}
        if status.get("readyToUse") and status.get("boundVolumeSnapshotContentName"):
            return
        problem = (status.get("error") or {}).get("message", "")
        now = time.monotonic()
        # The controller also notes what it mends by itself, so an error has to last.
        well = well if problem else now
        if now - well > _LASTING:
            cluster.delete_custom(SNAPSHOTS, request.name)
            raise StorageError(
                f"the snapshot of claim {request.claim} failed: {problem}; "
                "check its VolumeSnapshotClass"
            )
        if now > deadline:  # a slow one is left to go on
            state = "still being deleted" if leaving else "not ready"
            raise StorageError(
                f"snapshot {request.name} of claim {request.claim} is {state} after "
                f"{request.wait_seconds:.0f} s{problem and f' ({problem})'}; run this step again "
                "later, or give wait_seconds more"
            )
        time.sleep(_POLL)


def _claim(request: Request, staging: Object, source: Object, strategy: str) -> Object:
    """The published claim: exactly [ReadOnlyMany], the same size, pinned to the same zone."""
    annotations = {
        f"{DOMAIN}/digest": request.digest,
        f"{DOMAIN}/strategy": strategy,
        **request.lease,
    }
    if request.source:
        annotations[f"{DOMAIN}/source"] = display(request.source)
    node = staging["metadata"].get("annotations", {}).get(SELECTED_NODE)
    if node and strategy != "populator":
        # A late-binding class would follow the first reader's zone, away from the copy's source.
        annotations[SELECTED_NODE] = node
    size = staging["status"].get("capacity", {}).get("storage")
    size = size or staging["spec"]["resources"]["requests"]["storage"]
    spec: Object = {
        "accessModes": ["ReadOnlyMany"],
        "resources": {"requests": {"storage": size}},
        "volumeMode": staging["spec"].get("volumeMode", "Filesystem"),
        **source,
    }
    name = request.storage_class or staging["spec"].get("storageClassName")
    if name:
        spec["storageClassName"] = name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": request.name,
            "labels": request.labels,
            "annotations": annotations,
        },
        "spec": spec,
    }


def _bound(cluster: Cluster, request: Request, staging: Object, claim: Object | None) -> str:
    """Wait for the claim to be bound, unless it will only be when a pod uses it."""
    if _binds_late(cluster, request, staging):
        return "it is bound when a pod first uses it"
    deadline = time.monotonic() + request.wait_seconds
    while claim is None or claim["status"].get("phase") != "Bound":
        if time.monotonic() > deadline:
            raise StorageError(
                f"claim {request.name} is not bound after {request.wait_seconds:.0f} s; see "
                f"kubectl describe pvc {request.name}, or use publish=in-place"
            )
        time.sleep(_POLL)
        claim = cluster.claim(request.name)
    return "it is bound"


def _binds_late(cluster: Cluster, request: Request, staging: Object) -> bool:
    """Whether the class waits for a consumer; without a view of classes, by the staging claim."""
    own = staging["spec"].get("storageClassName")
    name = request.storage_class or own
    try:
        found = cluster.storage_class(name) if name else None
    except Refused:
        if name != own:
            return True  # unknown: a claim that waits for its pod must not be waited for
        return SELECTED_NODE in staging["metadata"].get("annotations", {})
    return found is not None and found.get("volumeBindingMode") == "WaitForFirstConsumer"
