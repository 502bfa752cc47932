"""Any compiled pipeline, run on this machine."""

import contextlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kfp_ddp.core.errors import InputError
from kfp_ddp.local import engine, results, survey
from kfp_ddp.pipelines.document import read
from kfp_ddp.pipelines.form import Form, check_arguments


def run(
    compiled: Path, source: str, output: Path, words: Sequence[str], file: Path | None
) -> dict[str, Any]:
    """Run a pipeline, leave what it made in `output`, and return what is known of it.

    Args:
        compiled: Its YAML.
        source: What it reads, where its form asks for that; '' for none.
        output: A new or empty folder, or that of an earlier run.
        words: Settings, as `key=value`.
        file: A YAML file of settings under them; None for none.

    Raises:
        KfpDdpError: the file, settings or output cannot be used, or the pipeline failed.
    """
    started = time.monotonic()
    pipeline = read(compiled)
    form = Form(pipeline)
    given = form.read(file, words)
    boxes = {"backend": "local"} if form.subjects and "backend" in form.parameters else {}
    if source:
        if "source" not in form.parameters:
            raise InputError(f"SOURCE cannot be used: {pipeline.name} has no parameter source")
        boxes["source"] = survey.located(source)
    if twice := [name for name in boxes if name in given]:
        raise InputError(f"{twice[0]} cannot be set: with --local it is {boxes[twice[0]]}")
    arguments = form.completed({**given, **boxes})
    check_arguments(pipeline, arguments)
    engine.prepare(output)
    click.echo(f"{pipeline.name} on this machine\n")
    engine.execute(output, compiled, arguments, {}, said if form.subjects else _outputs)
    seconds = round(time.monotonic() - started, 1)
    return {"pipeline": pipeline.name, "seconds": seconds, **report(output)}


def report(output: Path) -> dict[str, str]:
    """The report with the gate's verdict, copied to the top of `output`, where there is one."""
    target = output / "report.html"
    target.unlink(missing_ok=True)
    for made in output.glob("artifacts/*/gate/gate_report"):
        shutil.copyfile(made, target)
    return {"report": str(target)} if target.exists() else {}


def said(output: Path, step: str) -> str:
    """What a step of a pipeline with components of ours says of itself; else what it returned."""
    with contextlib.suppress(LookupError):  # a step of one's own may have a name of ours
        if detail := results.detail(output, step):
            return detail
    return _outputs(output, step)


def _outputs(output: Path, step: str) -> str:
    """What a step returned, in one line."""
    found = results.outputs(output, step)
    short = {name: value for name, value in found.items() if isinstance(value, int | float | str)}
    return ", ".join(str(v) if n == "Output" else f"{n} {v}" for n, v in short.items() if v != "")
