"""A namespace of a test, with the steps' account; it plays no pipelines: see `scene`."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from kubernetes import client

from tests.e2e.harness import rights
from tests.e2e.harness.grounds import Grounds

DATA = "kfp-ddp-data"
WORK = "kfp-ddp-work"


@contextmanager
def namespace(
    api: client.ApiClient, *, ours: bool = True, labels: dict[str, str] | None = None
) -> Iterator[Grounds]:
    """A fresh namespace with the steps' account, gone when the block is left."""
    core = client.CoreV1Api(api)
    name = f"e2e-{uuid.uuid4().hex[:8]}"
    core.create_namespace({"metadata": {"name": name, "labels": labels or {}}})
    try:
        yield Grounds(api, name, rights.grant(api, name, ours=ours))
    finally:
        core.delete_namespace(name)
