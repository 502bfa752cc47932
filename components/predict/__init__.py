"""A table with the class of each object of a source."""

from .component import predict

__all__ = ["predict"]
