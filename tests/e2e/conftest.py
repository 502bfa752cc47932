"""Fixtures of the tests on a cluster."""

from tests.e2e.harness.fixtures import begin, bucket_url, cluster, local_run, scene

__all__ = ["begin", "bucket_url", "cluster", "local_run", "scene"]
