"""What is measured of a model, beside what always is."""

from kfp_ddp.base.settings import Settings


class Measuring(Settings):
    """Further figures of an evaluation."""
