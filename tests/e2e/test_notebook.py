"""examples/notebook.ipynb against a KFP server whose runs are played on the cluster."""

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from kfp_ddp.core.container_images import REGISTRY
from tests.e2e.harness.scene import Scene
from tests.e2e.harness.training import TRAINING, WORKERS
from tests.integration.client.test_notebook import execute, printed
from tests.kfp_server.server import KfpServer, serving


@contextmanager
def playing(scene: Scene, folder: Path) -> Iterator[KfpServer]:
    """A KFP server whose runs are played on the cluster, one after the other."""
    over = threading.Event()

    def play(server: KfpServer, run_id: str, run: dict[str, Any]) -> None:
        server.store.set_state(run_id, "RUNNING")
        spec, file = run["pipeline_spec"], folder / f"{run_id}.yaml"
        file.write_text(yaml.safe_dump_all([spec["pipeline_spec"], spec["platform_spec"]]))
        parameters = run["runtime_config"].get("parameters", {})
        played = scene.run(file, run_id=run_id, **parameters)
        with contextlib.suppress(AssertionError):  # it is too slow
            played.play()
        state = "SUCCEEDED" if played.succeeded else "FAILED"
        server.put_run(run_id, state, dict.fromkeys(played.steps, state))
        log = "\n".join(step.log for step in played.steps.values()).encode()
        for task in run["run_details"]["task_details"]:
            server.logs |= {pod["pod_name"]: log for pod in task.get("child_tasks", ())}

    def play_all(server: KfpServer) -> None:
        while not over.wait(0.2):
            for run_id, run in [*server.store.runs.items()]:
                if run["state"] == "PENDING":
                    play(server, run_id, run)

    with serving() as server:
        thread = threading.Thread(target=play_all, args=[server])
        thread.start()
        try:
            yield server
        finally:
            over.set()
            thread.join()


def test_the_notebook_runs_on_the_cluster(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KFP_DDP_REGISTRY", REGISTRY)
    with playing(scene, tmp_path) as server:
        settings = {name: value for name, value in TRAINING.items() if name != "source"}
        cells = execute(
            tmp_path,
            HOST=server.url,
            NAMESPACE=scene.grounds.namespace,
            SOURCE=TRAINING["source"],
            SETTINGS=settings | {"job": WORKERS},
            JOB=WORKERS,
        )
    assert not server.violations
    lines = printed(cells[-1]).splitlines()
    assert [line for line in lines if "rank 0 of 2" in line], lines
    assert lines[-1] == "SUCCEEDED"
