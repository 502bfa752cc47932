"""Fixtures of the tests on a cluster."""

from tests.e2e.harness.fixtures import bucket_url, cluster, local_run, scene

__all__ = ["bucket_url", "cluster", "local_run", "scene"]
