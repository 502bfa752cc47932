"""A short training on computed images, which measures a cluster's GPUs, network and storage."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kfp_ddp.checks.finding import Requirements
from kfp_ddp.client import logs
from kfp_ddp.client.comparison import compare
from kfp_ddp.client.follow import check_success, until_over
from kfp_ddp.client.run_info import RunFinder, RunInfo, read_trainings
from kfp_ddp.client.submission import Inputs

if TYPE_CHECKING:
    from kfp_ddp.client.api import Client

ON_GPUS = ("synthetic://100x4000@224", "model=resnet50", "batch_size_per_rank=64", "epochs=10")
ON_CPUS = ("synthetic://10x1000@64", "model=cifar_resnet8", "batch_size_per_rank=32", "epochs=2")
"""Source and settings of about a minute; the image size is that of the source."""
LOGGED = {"data-sync": "downloaded", "train": "gradients takes"}
"""A word of the line with a step's figures."""
MEASURED = ("images_per_s", "ranks", "training_seconds")


def words_of(run: Requirements, seed: int) -> tuple[str, ...]:
    """Return the source, which nothing has stored yet, and the settings as KEY=VALUE."""
    source, *words = ON_CPUS if run.gpus_per_node == 0 else ON_GPUS
    words += [f"image_size={source.rpartition('@')[2]}", "pretrained=false", "recipe=none"]
    words += [f"{name}={getattr(run, name)}" for name in ("backend", "nodes", "gpus_per_node")]
    words += [f"work_claim={run.work_claim}", f"bucket_secret={run.bucket_secret}"]
    words += [f"claim={run.data_claim}", f"publish={run.publish}", "dataset=kfp-ddp-doctor"]
    words += [f"gpu_resource={run.gpu_resource}"]
    words += [f"scheduler={run.scheduler}"] if run.scheduler else []
    return f"{source}?seed={seed}", *words


def train(client: "Client", requirements: Requirements, silent: bool) -> RunInfo:
    """Run it on KFP until it is over; JobError if it fails."""
    source, *words = words_of(requirements, int(time.time()) % 10**9)
    request = client.plan(source, "train_resnet", "doctor", Inputs(words))
    run = until_over(client.finder, client.send(request).info, silent, to_stderr=True)
    check_success(run)
    return run


def figures(finder: RunFinder, run: RunInfo) -> Iterator[tuple[str, str]]:
    """Yield names and values: speed of the training, and what its steps logged."""
    with tempfile.TemporaryDirectory() as scratch:
        metrics = compare([(run, read_trainings(run.files(), Path(scratch)))]).metrics
    yield from ((m.name, m.texts()[0]) for m in metrics if m.name in MEASURED)
    for step, word in LOGGED.items():
        for leaf in logs.select_steps(run, step):
            yield from ((step, line) for line in logs.lines(run, leaf, finder.api) if word in line)
