"""A namespace set as for a user of KFP: account, claims, bucket; runs are played in it."""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import client

from kfp_ddp.core.container_images import Images
from tests.e2e.harness import grounds, workflow
from tests.e2e.harness.grounds import IMAGES, Folder, Grounds
from tests.e2e.harness.namespace import DATA, WORK, namespace
from tests.e2e.harness.play import Run

COMPILED = Path(__file__).parents[3] / "compiled" / "train_resnet.yaml"
ARTIFACTS = "artifacts"


@dataclass(frozen=True)
class Scene:
    """What a test needs to play runs and to look at what they leave."""

    grounds: Grounds
    data: Folder
    work: Folder
    artifacts: Folder
    mirror: Path

    def events(self, run: Run) -> list[dict[str, Any]]:
        """What the run's one training wrote to its metrics file on the work claim."""
        (task,) = (name for name in self.work.names(run.id) if name.startswith("train"))
        return self.work.events(f"{run.id}/{task}metrics.jsonl")

    def run(
        self,
        compiled: Path = COMPILED,
        /,
        *,
        grace: float = 0.2,
        images: Images = IMAGES,
        run_id: str = "",
        **arguments: Any,
    ) -> Run:
        """A run that is about to be played: of the committed pipeline, or of another one."""
        return Run(
            self.grounds,
            compiled,
            arguments,
            artifacts_claim=ARTIFACTS,
            artifacts=self.artifacts,
            mirror=self.mirror,
            grace=grace,
            images=images,
            run_id=run_id,
        )


@contextmanager
def make_scene(
    api: client.ApiClient,
    folder: Path,
    environment: dict[str, str],
    *,
    storage_class: str | None = None,
    size: str = "1Gi",
    ours: bool = True,
    strict: dict[str, str] | None = None,
) -> Iterator[Scene]:
    """The scene, with claims of `storage_class` for data and work.

    With `strict` it is one where PodSecurity is `restricted` and that is the ResourceQuota.
    """
    workflow.define(api)
    labels = {"pod-security.kubernetes.io/enforce": "restricted"} if strict else {}
    with namespace(api, ours=ours, labels=labels) as bare, contextlib.ExitStack() as stack:
        # Thread pools sized for a big machine only fight over a small one.
        ground = dataclasses.replace(
            bare, environment={"OMP_NUM_THREADS": "1"} | environment, exact=strict is not None
        )
        if strict:
            quota = {"metadata": {"name": "compute"}, "spec": {"hard": strict}}
            ground.core.create_namespaced_resource_quota(ground.namespace, quota)
        grounds.claim(ground, DATA, storage_class, size)
        grounds.claim(ground, WORK, storage_class, size)
        grounds.claim(ground, ARTIFACTS)
        data, work, artifacts = (
            stack.enter_context(grounds.serve_files(ground, name))
            for name in (DATA, WORK, ARTIFACTS)
        )
        yield Scene(ground, data, work, artifacts, folder / "artifacts")
