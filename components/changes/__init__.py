"""Tells whether a training would come to anything that is not known already."""

from kfp_ddp.components.changes.component import changes

__all__ = ["changes"]
