"""An API server that fails one kind of request: a webhook that it must ask does not answer."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from kubernetes import client

from tests.e2e.harness.grounds import Grounds

NOBODY = "https://127.0.0.1:1/"  # the API server answers 500 for it at once
ACCOUNT = "request.userInfo.username == 'system:serviceaccount:{0.namespace}:{0.service_account}'"


@contextmanager
def failing(grounds: Grounds, operation: str, group: str, resource: str) -> Iterator[None]:
    """Fail such requests of the steps' account while the block lasts."""
    webhooks = client.AdmissionregistrationV1Api(grounds.api)
    name = f"failing-{uuid.uuid4().hex[:8]}.kfp-ddp.test"
    webhook = {
        "name": name,
        "clientConfig": {"url": NOBODY},
        "rules": [
            {
                "operations": [operation],
                "apiGroups": [group],
                "apiVersions": ["*"],
                "resources": [resource],
            }
        ],
        "matchConditions": [{"name": "account", "expression": ACCOUNT.format(grounds)}],
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "failurePolicy": "Fail",
    }
    webhooks.create_validating_webhook_configuration(
        {"metadata": {"name": name}, "webhooks": [webhook]}
    )
    try:
        yield
    finally:
        webhooks.delete_validating_webhook_configuration(name)
