"""Fixtures of the tests on a cluster."""

import gc
import os
import time
import warnings

import pytest

from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.k8s.api import Api, serves
from tests.e2e.harness.fixtures import begin, bucket_url, cluster, local_run, scene

__all__ = ["begin", "bucket_url", "cluster", "local_run", "scene"]

LONGEST = ("test_pipeline_jobs", "test_pipelines", "test_deploy_divided", "test_launch_train_step")
"""In minutes of their smoke tests on two busy cores: 11, 4, 2 and 2; of all files, 24."""
MINUTES = float(os.environ.get("KFP_DDP_TEST_MINUTES", "inf"))
"""After so many no further test is begun; the tests are then in the order of the command line."""
BEGAN = time.monotonic()
# The kubernetes client leaves pooled connections, and streams that were cut, to the collector.
UNCLOSED = ("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _operator(request: pytest.FixtureRequest) -> None:
    """Skip a test of a kind of job whose operator the cluster lacks."""
    parameters = getattr(request.node, "callspec", None)
    kind = KINDS.get(parameters.params.get("kind", "") if parameters else "")
    if kind and not serves(Api(request.getfixturevalue("cluster"), "default"), kind.resource):
        pytest.skip(f"no {kind.title}: {kind.operator} is not installed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, and let no connection that the harness left open fail a test.

    A worker that begins a long file last works alone for minutes.
    """
    if float("inf") == MINUTES:
        items.sort(key=lambda item: item.path.stem not in LONGEST)
    for item in items:
        if "e2e" in item.path.parts:
            for rule in UNCLOSED:
                item.add_marker(pytest.mark.filterwarnings(rule))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin no test when the time is over; the summary names the files that were not run whole."""
    if time.monotonic() - BEGAN > 60 * MINUTES:
        pytest.skip(f"{item.path.name}: not begun within {MINUTES:g} minutes")


def pytest_sessionfinish() -> None:
    """Collect what is left of them before pytest looks for warnings a last time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
