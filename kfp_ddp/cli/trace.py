"""`kfp-ddp trace`: a profiler trace of one rank of a running training."""

from pathlib import Path

import click

from kfp_ddp.cli.options import echo
from kfp_ddp.core.run_folder import MOST_TRACED_STEPS


@click.command("trace")
@click.argument("run", metavar="FOLDER|ADDRESS")
@click.option("--rank", type=click.IntRange(0), default=0, help="The rank to trace.")
@click.option(
    "--steps", type=click.IntRange(1, MOST_TRACED_STEPS), default=5, help="Number of steps."
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder for the trace of a run in a bucket.",
)
@click.option("--minutes", default=5.0, help="Timeout.")
def command(run: str, rank: int, steps: int, output: Path, minutes: float) -> None:
    """Trace the next steps of one rank of a running training, and print the path of the file.

    FOLDER is the training's, with its metrics.jsonl, or the output of `run --local`; ADDRESS is
    its URI in a bucket. A run on a PVC is traced from a pod that mounts it:
    kubectl exec POD -- kfp-ddp trace /work/RUN_ID/train --rank 3. The rank polls for requests
    every 10 seconds; the others wait for it while it traces. Open the file in
    https://ui.perfetto.dev or chrome://tracing.

    kfp-ddp trace run-output/latest --rank 1 --steps 5
    """
    from kfp_ddp.client.trace import trace

    echo(trace(run, rank, steps, output, minutes, lambda line: echo(line, err=True)))
