"""Fixtures of the tests on a cluster."""

import gc
import warnings

import pytest

from tests.e2e.harness.fixtures import begin, bucket_url, cluster, local_run, scene

__all__ = ["begin", "bucket_url", "cluster", "local_run", "scene"]

# The kubernetes client leaves pooled connections, and streams that were cut, to the collector.
UNCLOSED = ("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let no connection that the harness left open fail the test that runs at its collection."""
    for item in items:
        if "e2e" in item.path.parts:
            for rule in UNCLOSED:
                item.add_marker(pytest.mark.filterwarnings(rule))


def pytest_sessionfinish() -> None:
    """Collect what is left of them before pytest looks for warnings a last time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
