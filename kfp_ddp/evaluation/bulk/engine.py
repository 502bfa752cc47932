"""The predict step: objects and a bundle in, a table out."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.step import step, write_artifact
from kfp_ddp.core.text import cell, plural
from kfp_ddp.evaluation.bulk.plan import Destination
from kfp_ddp.evaluation.bulk.request import create
from kfp_ddp.evaluation.engine import job_fields, run_job, run_processes
from kfp_ddp.jobs.local import PREDICTION, local_gpus

if TYPE_CHECKING:
    from kfp import dsl


@step
def run(
    *,
    source: str,
    bundle: str,
    table: str,
    options: Mapping[str, Any],
    run_id: str,
    task_name: str,
    task_id: str,
    backend: str,
    job: Mapping[str, Any],
    image: str,
    task_config: Any,
    prediction_metrics: "dsl.Metrics",
    prediction_summary: "dsl.Markdown",
) -> tuple[str, int, int]:
    """Predict, fill the artifacts, and return the table, its rows, and those unreadable."""
    fields, request = job_fields(job, image, backend), create(source, bundle, table, options)
    destination, ids = Destination(table), (run_id, task_name, task_id)
    ranks = int(fields.get("nproc_per_node", 0)) if backend == "local" else 0
    if backend != "local":
        if not destination.store.remote:
            raise InputError(f"table={table!r} is not in a bucket, which each pod could write to")
        paths = (source, f"{destination.store.uri}/{destination.parts}run")
        run_job(request, fields, task_config, backend, ids, paths=paths, program=PREDICTION)
        destination.delete_parts()
    elif (ranks or local_gpus()) > 1:
        with tempfile.TemporaryDirectory() as folder:
            own = request.changed(output_dir=folder)
            run_processes(own, ranks or local_gpus(), PREDICTION, "prediction")
    else:
        from kfp_ddp.evaluation.bulk.rank import predict_share

        predict_share(request)
    summary = destination.summary()
    figures = ("rows", "computed", "unreadable", "seconds")
    for name in figures:
        prediction_metrics.log_metric(name, getattr(summary, name))
    write_artifact(prediction_metrics, summary.model_dump_json())
    line = f"{plural(summary.rows, 'row')} in {table}, {summary.computed:,} of them new"
    counts = [f"| {cell(name)} | {count:,} |" for name, count in summary.classes.items()]
    text = [
        f"**{line}, {summary.unreadable:,} unreadable**",
        "",
        "| Class | Objects |",
        "|---|---|",
    ]
    Path(prediction_summary.path).write_text("\n".join([*text, *counts]) + "\n", encoding="utf-8")
    print(line)
    return table, summary.rows, summary.unreadable
