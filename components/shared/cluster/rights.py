"""What an account may do in a namespace, as the API server answers it."""

from kfp_ddp.components.shared.cluster.api import Api, ApiError, Object


def allowed(api: Api, verb: str, group: str, resource: str) -> bool:
    """Whether this account may do so; true where it cannot be told."""
    try:
        return api.patient(lambda: review(api, verb, group, resource))
    except ApiError:
        return True


def review(
    api: Api, verb: str, group: str, resource: str, subresource: str = "", user: str = ""
) -> bool:
    """Ask the server by SelfSubjectAccessReview, or SubjectAccessReview for another `user`."""
    attributes = {
        "namespace": api.namespace,
        "verb": verb,
        "group": group,
        "resource": resource,
        "subresource": subresource,
    }
    kind = "SubjectAccessReview" if user else "SelfSubjectAccessReview"
    spec: Object = {"resourceAttributes": attributes}
    if user:
        spec["user"] = user
    body: Object = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
    answer = api.call("POST", f"/apis/authorization.k8s.io/v1/{kind.lower()}s", body)
    return bool(answer["status"]["allowed"])
