"""The exit handler that ends whatever a run left behind."""

from kfp_ddp.components.teardown.component import teardown

__all__ = ["teardown"]
