"""Publish a version on a staging PVC as a PVC that many workers mount."""

from collections.abc import Callable

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.datasets.volume.cluster import (
    CLAIMS,
    GCP_SOURCES,
    SNAPSHOT_CLASSES,
    SNAPSHOTS,
    STORAGE_CLASSES,
    Cluster,
    Refused,
)
from kfp_ddp.datasets.volume.copies import copy, populator
from kfp_ddp.datasets.volume.request import DOMAIN, LEASE, MANAGED, Published, Request
from kfp_ddp.jobs.identity import live_runs
from kfp_ddp.k8s.api import Object

_LOCAL = ("rancher.io/local-path", "k8s.io/minikube-hostpath", "kubernetes.io/no-provisioner")
_PD = "pd.csi.storage.gke.io"


def publish(cluster: Cluster, request: Request) -> Published:
    """Publish by the requested strategy; `auto` falls back to in-place with a note."""
    strategy: str = request.publish
    notes: list[str] = []
    try:
        staging = cluster.get(CLAIMS, request.claim)
    except Refused as error:
        raise _no_right(error, strategy) from error
    if staging is None:
        raise InputError(
            f"claim {request.claim} is not in namespace {cluster.namespace}; create it, and sync"
        )
    if strategy == "auto":
        strategy, why = choose(cluster, staging)
        notes.append(f"auto: {strategy}, as {why}")
    try:
        if strategy == "in-place":
            done = in_place(cluster, request, staging)
        elif strategy == "populator":
            done = populator(cluster, request, staging)
        else:
            done = copy(cluster, request, staging, strategy)
    except Refused as error:
        if request.publish != "auto" or strategy == "in-place":
            raise _no_right(error, strategy) from error
        notes.append(f"{strategy} was refused ({error}): in-place instead")
        done = in_place(cluster, request, staging)
    done.notes = notes + done.notes
    return done


def choose(cluster: Cluster, staging: Object) -> tuple[str, str]:
    """Return the best strategy that is known to work here, and the reason."""
    if "ReadWriteMany" in staging["spec"]["accessModes"]:
        return "in-place", "the claim can be mounted by many"
    name = staging["spec"].get("storageClassName")
    try:
        storage_class = cluster.get(STORAGE_CLASSES, name) if name else None
    except Refused:
        return "in-place", f"the storage class {name} is not visible to this service account"
    if storage_class is None or storage_class["provisioner"] in _LOCAL:
        return "in-place", "the storage can make no copies"
    driver = storage_class["provisioner"]
    multi_zone = storage_class.get("parameters", {}).get("enable-multi-zone-provisioning") == "true"
    if driver == _PD and not multi_zone:
        return "clone", "a persistent disk is cloned fastest"
    try:
        drivers = {item["driver"] for item in cluster.items(SNAPSHOT_CLASSES)}
    except Refused as error:
        return "in-place", f"snapshots cannot be used ({error})"
    if driver in drivers:
        return "snapshot", f"{driver} has a snapshot class"
    return "in-place", f"{driver} has no snapshot class"


def in_place(cluster: Cluster, request: Request, staging: Object) -> Published:
    """Publish the staging PVC itself, for read-only mounts."""
    modes = staging["spec"]["accessModes"]
    notes = [f"readers mount {request.claim} ({', '.join(modes)}) with readOnly: true"]
    try:
        cluster.label_claim(
            request.claim,
            {
                "labels": {f"{DOMAIN}/dataset": request.dataset},
                "annotations": {f"{DOMAIN}/digest": request.digest},
            },
        )
    except Refused as error:
        notes.append(f"the claim is not labelled with the dataset and digest ({error})")
    if not {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
        notes.append("its access mode lets pods of only one node mount it at a time")
    return Published(request.claim, request.path, "in-place", notes)


def collect(cluster: Cluster, request: Request, current: str) -> list[str]:
    """Delete published PVCs of the dataset that are old and not in use; return their names.

    In use is what a pod mounts, and what was handed to a run that still lives. Keeps the
    `keep_claims` newest, 0 for all.
    """
    if request.keep_claims <= 0:
        return []
    selector = ",".join(
        f"{key}={value}"
        for key, value in (MANAGED | {f"{DOMAIN}/dataset": request.dataset}).items()
    )
    claims = [
        claim
        for claim in cluster.items(CLAIMS, {"labelSelector": selector})
        if claim["metadata"]["name"].startswith("ds-")
        and "deletionTimestamp" not in claim["metadata"]
    ]
    claims.sort(key=lambda claim: str(claim["metadata"]["creationTimestamp"]), reverse=True)
    old = [claim for claim in claims[request.keep_claims :] if claim["metadata"]["name"] != current]
    alive = live_runs(cluster.api) if old else lambda run_id: False
    return [claim["metadata"]["name"] for claim in old if _collected(cluster, claim, alive)]


def _collected(cluster: Cluster, claim: Object, alive: Callable[[str], bool]) -> bool:
    """Delete an unused PVC with its snapshot; return whether it was deleted."""
    name, notes = claim["metadata"]["name"], claim["metadata"].get("annotations", {})
    runs = [run for key, run in notes.items() if key.startswith(LEASE)]
    if any(map(alive, runs)) or cluster.users(name) or not cluster.delete_unchanged(claim):
        return False
    for kind in (SNAPSHOTS, GCP_SOURCES):
        try:
            cluster.delete(kind, name)
        except Refused:
            continue  # not installed or forbidden, so there is none to delete
    return True


def _no_right(error: Refused, strategy: str) -> StorageError:
    less = "none" if strategy == "in-place" else "in-place"
    return StorageError(
        f"cannot {error}; grant the right to the service account (deploy/storage), or use "
        f"publish={less}"
    )
