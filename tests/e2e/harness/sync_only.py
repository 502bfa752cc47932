"""A pipeline of the data_sync step alone: all that a run of the train step needs before it."""

from pathlib import Path

from kfp import compiler, dsl, kubernetes

from kfp_ddp.components.data_sync.component import data_sync


@dsl.pipeline(name="sync-only")  # type: ignore[untyped-decorator]
def sync_only(source: str, data_claim: str, dataset: str) -> None:
    """Sync as the whole pipeline does."""
    task = data_sync(source=source, dataset=dataset).set_caching_options(False)
    kubernetes.mount_pvc(task, pvc_name=data_claim, mount_path="/data")


def compiled(folder: Path) -> Path:
    """The pipeline as a document in `folder`."""
    path = folder / "sync-only.yaml"
    compiler.Compiler().compile(sync_only, str(path))
    return path
