"""The files that a run wrote: in a folder here, below a bucket's prefix, or on a claim."""

from kfp_ddp.client.run_files.claim import on_a_claim
from kfp_ddp.client.run_files.files import PlacedFiles, RunFiles

__all__ = ["PlacedFiles", "RunFiles", "on_a_claim"]
