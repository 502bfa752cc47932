"""The exit handler that ends whatever a run left behind."""

from .component import teardown

__all__ = ["teardown"]
