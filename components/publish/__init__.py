"""Puts a blessed bundle where others take it from: sealed with its verdict, uploaded, champion."""

from .component import publish

__all__ = ["publish"]
