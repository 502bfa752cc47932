"""Ranks trainings that were tried with different settings, and hands on the best."""

from kfp_ddp.components.tune.component import tune

__all__ = ["tune"]
