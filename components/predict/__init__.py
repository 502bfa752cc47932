"""A table with the class of each object of a source."""

from kfp_ddp.components.predict.component import predict

__all__ = ["predict"]
