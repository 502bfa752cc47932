"""Publish a version on a staging PVC as a ReadOnlyMany one, copied by the storage."""

import contextlib
import time
from collections.abc import Callable

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.log import log
from kfp_ddp.datasets.volume.cluster import (
    ATTACHMENTS,
    CLAIMS,
    SNAPSHOT_CLASSES,
    SNAPSHOTS,
    create_unless_exists,
    delete_unchanged,
    pods_mounting,
)
from kfp_ddp.datasets.volume.request import DOMAIN, LEASE, MANAGED, Published, VolumeRequest
from kfp_ddp.jobs.live_runs import live_runs
from kfp_ddp.k8s.api import Api, Object, Refused, poll
from kfp_ddp.k8s.objects import annotation, part
from kfp_ddp.k8s.resource import STORAGE_CLASSES, Resource
from kfp_ddp.storage.http.origin import display

SELECTED_NODE = "volume.kubernetes.io/selected-node"
_POLL = 1.0
_LASTING = 30.0
_LOCAL = ("rancher.io/local-path", "k8s.io/minikube-hostpath", "kubernetes.io/no-provisioner")
_PD = "pd.csi.storage.gke.io"


def publish(api: Api, request: VolumeRequest) -> Published:
    """Publish by the requested strategy; `auto` falls back to in-place with a note."""
    strategy: str = request.publish
    notes: list[str] = []
    try:
        staging = api.get(CLAIMS, request.claim, retry=True) or {}
        if not staging:
            raise InputError(
                f"claim {request.claim} is not in namespace {api.namespace}; create it, and sync"
            )
        if strategy == "auto":
            strategy, why = choose(api, staging)
            notes.append(f"auto: {strategy}, as {why}")
        if strategy == "in-place":
            done = mount_in_place(api, request, staging)
        else:
            done = copy(api, request, staging, strategy)
    except Refused as error:
        # Only auto chooses again, and after in-place there is nothing left to choose.
        if request.publish != "auto" or strategy in ("auto", "in-place"):
            less = "none" if strategy == "in-place" else "in-place"
            raise StorageError(f"{error}; or use publish={less}") from error
        notes.append(f"{strategy} was refused ({error}): in-place instead")
        done = mount_in_place(api, request, staging)
    done.notes = notes + done.notes
    return done


def choose(api: Api, staging: Object) -> tuple[str, str]:
    """Return the best strategy that is known to work here, and the reason."""
    if "ReadWriteMany" in staging["spec"]["accessModes"]:
        return "in-place", "the claim can be mounted by many"
    name = staging["spec"].get("storageClassName")
    try:
        storage_class = api.get(STORAGE_CLASSES, name, retry=True) if name else None
    except Refused:
        return "in-place", f"the storage class {name} is not visible to this service account"
    if storage_class is None or storage_class["provisioner"] in _LOCAL:
        return "in-place", "the storage can make no copies"
    driver = storage_class["provisioner"]
    multi_zone = storage_class.get("parameters", {}).get("enable-multi-zone-provisioning") == "true"
    if driver == _PD and not multi_zone:
        return "clone", "a persistent disk is cloned fastest"
    try:
        drivers = {item["driver"] for item in api.list_objects(SNAPSHOT_CLASSES, retry=True)}
    except Refused as error:
        return "in-place", f"snapshots cannot be used ({error})"
    if driver in drivers:
        return "snapshot", f"{driver} has a snapshot class"
    return "in-place", f"{driver} has no snapshot class"


def mount_in_place(api: Api, request: VolumeRequest, staging: Object) -> Published:
    """Publish the staging PVC itself, for read-only mounts."""
    modes = staging["spec"]["accessModes"]
    notes = [f"readers mount {request.claim} ({', '.join(modes)}) with readOnly: true"]
    try:
        labels = {f"{DOMAIN}/dataset": request.dataset}
        metadata = {"labels": labels, "annotations": {f"{DOMAIN}/digest": request.digest}}
        api.patch(CLAIMS, request.claim, {"metadata": metadata}, retry=True)
    except Refused as error:
        notes.append(f"the claim is not labelled with the dataset and digest ({error})")
    if not {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
        notes.append("its access mode lets pods of only one node mount it at a time")
    return Published(request.claim, request.path, "in-place", notes)


def collect(api: Api, request: VolumeRequest, current: str, dry_run: bool = False) -> list[str]:
    """Delete published PVCs but the `keep_claims` newest and those in use; return their names."""
    if request.keep_claims <= 0:
        return []
    labels = MANAGED | {f"{DOMAIN}/dataset": request.dataset}
    selector = ",".join(f"{key}={value}" for key, value in labels.items())
    claims = api.list_objects(CLAIMS, {"labelSelector": selector}, retry=True)
    claims = list(filter(_is_published, claims))
    claims.sort(key=lambda claim: str(claim["metadata"]["creationTimestamp"]), reverse=True)
    old = [claim for claim in claims[request.keep_claims :] if claim["metadata"]["name"] != current]
    alive = live_runs(api) if old else lambda run_id: False
    return [claim["metadata"]["name"] for claim in old if _collected(api, claim, alive, dry_run)]


def _is_published(claim: Object) -> bool:
    """Return whether a PVC of a dataset is one of ours that stays."""
    is_ours = str(claim["metadata"]["name"]).startswith("ds-")
    return is_ours and not _is_leaving(claim)


def _collected(api: Api, claim: Object, alive: Callable[[str], bool], dry_run: bool) -> bool:
    """Delete an unused PVC with its snapshot; return whether it was, or would be, deleted."""
    name = claim["metadata"]["name"]
    annotations = claim["metadata"].get("annotations", {})
    runs = [run for key, run in annotations.items() if key.startswith(LEASE)]
    if any(map(alive, runs)) or pods_mounting(api, name):
        return False
    if dry_run or not delete_unchanged(api, claim):
        return dry_run
    with contextlib.suppress(Refused):  # not installed or forbidden, so there is none to delete
        api.delete(SNAPSHOTS, name)
    return True


def copy(api: Api, request: VolumeRequest, staging: Object, strategy: str) -> Published:
    """Publish a ReadOnlyMany PVC: a clone of the staging PVC, or restored from its snapshot."""
    claim = _reusable(api, request, strategy)
    if claim is not None:
        notes = [f"{request.name} was there already, of this digest: used again"]
    else:
        _wait_for_writers(api, request)
        notes = _wait_for_detachment(api, request, staging)
        if strategy == "snapshot":
            _snapshot(api, request)
            source = {"apiGroup": SNAPSHOTS.group, "kind": "VolumeSnapshot", "name": request.name}
        else:
            source = {"kind": "PersistentVolumeClaim", "name": request.claim}
        body = _claim(request, staging, {"dataSource": source}, strategy)
        claim = create_unless_exists(api, CLAIMS, body) or _leased(api, request)
        notes.append(f"made {request.name} as a {strategy} of {request.claim}")
    notes.append(_wait_until_bound(api, request, staging, claim))
    return Published(request.name, request.path, strategy, notes)


def _reusable(api: Api, request: VolumeRequest, strategy: str) -> Object | None:
    """Return the published PVC with the lease of the run; wait for one that is being deleted."""
    late = poll(request.wait_seconds, _POLL)
    while (claim := _leased(api, request)) is not None:
        if not _is_leaving(claim):
            if claim["status"].get("phase") != "Lost":
                _check_same(claim, request, strategy)
                return claim
            api.delete(CLAIMS, request.name)
        if next(late):
            users = ", ".join(pods_mounting(api, request.name)) or "none seen"
            raise StorageError(
                f"claim {request.name} is being deleted and {request.wait_seconds:.0f} s were not "
                f"enough; end the pods that use it: {users}"
            )
    return None


def _check_same(claim: Object, request: VolumeRequest, strategy: str) -> None:
    """Raise StorageError if a PVC of this name has other files, or another layout of them."""
    annotations = claim["metadata"].get("annotations", {})
    # GKE filled it for an earlier release: its files are at the root, not below versions/.
    if annotations.get(f"{DOMAIN}/strategy") == "populator":
        raise StorageError(
            f"claim {request.name} was published with publish=populator, which lays its files out "
            f"in another way than {strategy}; delete it"
        )
    modes = claim["spec"]["accessModes"]
    if annotations.get(f"{DOMAIN}/digest") != request.digest or modes != ["ReadOnlyMany"]:
        raise StorageError(
            f"claim {request.name} exists and is not a ReadOnlyMany claim of this digest; delete it"
        )


def _is_leaving(resource: Object) -> bool:
    """Return whether Kubernetes is deleting an object, which waits for who uses it."""
    return "deletionTimestamp" in resource["metadata"]


def _leased(api: Api, request: VolumeRequest) -> Object | None:
    """Return the published PVC, if any, leased first so that no other run can delete it unseen."""
    claim = api.get(CLAIMS, request.name, retry=True)
    if claim is None or not request.lease:
        return claim
    if _is_leaving(claim):
        return claim
    leased = {"metadata": {"annotations": request.lease}}
    return api.patch(CLAIMS, request.name, leased, retry=True)


def _wait_for_writers(api: Api, request: VolumeRequest) -> None:
    """Wait until no pod writes to the staging PVC: a copy would have a journal to replay."""
    reported: list[str] = []
    for late in poll(request.wait_seconds, _POLL):
        users = pods_mounting(api, request.claim, writing=True)
        if not users:
            return
        if users != reported:
            log.info(f"claim {request.claim} is mounted by {', '.join(users)}; waiting")
            reported = users
        if late:
            raise StorageError(
                f"claim {request.claim} is still mounted by {', '.join(users)} after "
                f"{request.wait_seconds:.0f} s; end them, or use publish=in-place"
            )


def _wait_for_detachment(api: Api, request: VolumeRequest, staging: Object) -> list[str]:
    """Wait until the volume is unmounted; return a note if attachments are not visible."""
    volume = staging["spec"].get("volumeName")
    if not volume or "ReadWriteMany" in staging["spec"]["accessModes"]:
        return []
    for late in poll(request.wait_seconds, _POLL):
        try:
            attachments = [item["spec"] for item in api.list_objects(ATTACHMENTS, retry=True)]
        except Refused as error:
            return [f"whether the volume was unmounted cannot be seen ({error})"]
        nodes = [
            attachment["nodeName"]
            for attachment in attachments
            if attachment["source"].get("persistentVolumeName") == volume
        ]
        if not nodes:
            break
        if late:
            raise StorageError(
                f"the volume of claim {request.claim} is still attached to "
                f"{', '.join(nodes)} after {request.wait_seconds:.0f} s; end the pods that "
                "mount it, readers too, or use publish=in-place"
            )
    return []


def _snapshot(api: Api, request: VolumeRequest) -> None:
    """Get or create the snapshot, and wait until it can be restored."""
    body = _snapshot_body(request)
    without_error = time.monotonic()
    for late in poll(request.wait_seconds, _POLL):
        snapshot = api.get(SNAPSHOTS, request.name, retry=True)
        if snapshot is None:
            create_unless_exists(api, SNAPSHOTS, body)
        status = _snapshot_status(snapshot)
        if status.get("readyToUse") and status.get("boundVolumeSnapshotContentName"):
            return
        problem = part(status, "error").get("message", "")
        now = time.monotonic()
        if not problem:
            without_error = now
        # The controller also reports errors that it recovers from, so an error has to last.
        if now - without_error > _LASTING:
            api.delete(SNAPSHOTS, request.name)
            raise StorageError(
                f"the snapshot of claim {request.claim} failed: {problem}; "
                "check its VolumeSnapshotClass"
            )
        if late:  # a slow snapshot is not deleted
            leaving = snapshot is not None and _is_leaving(snapshot)
            state = "still being deleted" if leaving else "not ready"
            why = f" ({problem})" if problem else ""
            raise StorageError(
                f"snapshot {request.name} of claim {request.claim} is {state} after "
                f"{request.wait_seconds:.0f} s{why}; run this step again later, or give "
                "wait_seconds more"
            )


def _snapshot_body(request: VolumeRequest) -> Object:
    """Return the snapshot of the staging PVC, to create it."""
    spec: Object = {"source": {"persistentVolumeClaimName": request.claim}}
    if request.snapshot_class:
        spec["volumeSnapshotClassName"] = request.snapshot_class
    annotations = {f"{DOMAIN}/digest": request.digest}
    return _object(request, SNAPSHOTS, "VolumeSnapshot", spec, annotations)


def _snapshot_status(snapshot: Object | None) -> Object:
    """Return the status of a snapshot; {} if there is none that lasts."""
    if snapshot is None or _is_leaving(snapshot):
        return {}
    status: Object = snapshot.get("status") or {}
    return status


def _claim(request: VolumeRequest, staging: Object, source: Object, strategy: str) -> Object:
    """Return the published PVC: exactly [ReadOnlyMany], the same size, in the same zone."""
    annotations = {f"{DOMAIN}/digest": request.digest, f"{DOMAIN}/strategy": strategy}
    annotations |= request.lease
    if request.source:
        annotations[f"{DOMAIN}/source"] = display(request.source)
    node = annotation(staging, SELECTED_NODE)
    if node:
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
    if name := request.storage_class or staging["spec"].get("storageClassName"):
        spec["storageClassName"] = name
    return _object(request, CLAIMS, "PersistentVolumeClaim", spec, annotations)


def _object(
    request: VolumeRequest, resource: Resource, name: str, spec: Object, annotations: dict[str, str]
) -> Object:
    metadata = {"name": request.name, "labels": request.labels, "annotations": annotations}
    version = resource.group_version
    return {"apiVersion": version, "kind": name, "metadata": metadata, "spec": spec}


def _wait_until_bound(
    api: Api, request: VolumeRequest, staging: Object, claim: Object | None
) -> str:
    """Wait for the PVC to be bound, unless a pod has to use it first."""
    if _binds_late(api, request, staging):
        return "it is bound when a pod first uses it"
    for late in poll(request.wait_seconds, _POLL):
        if claim is not None and claim["status"].get("phase") == "Bound":
            break
        if late:
            raise StorageError(
                f"claim {request.name} is not bound after {request.wait_seconds:.0f} s; see "
                f"kubectl describe pvc {request.name}, or use publish=in-place"
            )
        claim = api.get(CLAIMS, request.name, retry=True)
    return "it is bound"


def _binds_late(api: Api, request: VolumeRequest, staging: Object) -> bool:
    """Return whether the class waits for a pod; if it is not visible, judge by the staging PVC."""
    own = staging["spec"].get("storageClassName")
    name = request.storage_class or own
    try:
        storage_class = api.get(STORAGE_CLASSES, name, retry=True) if name else None
    except Refused:
        # Unknown: a PVC that waits for its pod must not be waited for.
        return name != own or annotation(staging, SELECTED_NODE) != ""
    return (storage_class or {}).get("volumeBindingMode") == "WaitForFirstConsumer"
