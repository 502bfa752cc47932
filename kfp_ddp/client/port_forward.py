"""A port of a service's pod on this machine, through the API server of a kubeconfig."""

import contextlib
from collections.abc import Iterator

from kfp_ddp.base.errors import InputError


@contextlib.contextmanager
def service(name: str, namespace: str, port: int, context: str = "") -> Iterator[str]:
    """The address of a service's port on this machine, for as long as the block runs."""
    raise InputError("no address of KFP is set: give --host, or set KFP_DDP_HOST")
    yield ""
