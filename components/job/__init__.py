"""A step that runs a distributed job of any kind."""

from kfp_ddp.components.job.component import job

__all__ = ["job"]
