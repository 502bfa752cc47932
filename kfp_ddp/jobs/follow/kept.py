"""What is kept of a pod and of an event: a hundredth of a large job's memory, and all that is used.

Of a pod as the API server gives it most is how it was made and who wrote which field of it.
"""

from collections.abc import Sequence

from kfp_ddp.k8s.api import Object

METADATA = ("name", "uid", "labels", "creationTimestamp", "deletionTimestamp")
SPEC = ("nodeName", "restartPolicy", "terminationGracePeriodSeconds")
STATUS = ("phase", "reason", "message", "conditions")
CONTAINER = ("name", "image", "imageID", "state", "lastState", "restartCount")
EVENT = ("involvedObject", "reason", "message", "lastTimestamp", "eventTime")


def of_pod(pod: Object) -> Object:
    """A pod with what is asked of it here, in a record of its images, and in words."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    claims = [each for each in spec.get("volumes") or () if "persistentVolumeClaim" in each]
    containers = {
        name: [_of(each, CONTAINER) for each in status[name]]
        for name in ("containerStatuses", "initContainerStatuses")
        if status.get(name)
    }
    return {
        "metadata": _of(pod["metadata"], METADATA),
        "spec": {
            **_of(spec, SPEC),
            "volumes": claims,
            "containers": [_of(each, ("name", "image")) for each in spec.get("containers") or ()],
        },
        "status": {**_of(status, STATUS), **containers},
    }


def of_event(event: Object) -> Object:
    """An event with what it is about, what it says, and when."""
    return {"metadata": _of(event["metadata"], ("name", "uid")), **_of(event, EVENT)}


def _of(item: Object, names: Sequence[str]) -> Object:
    return {name: item[name] for name in names if name in item}
