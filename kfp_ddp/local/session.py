"""What a run says to who started it, beside its phases."""

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kfp_ddp.local import results


def conduct(run: Callable[[], dict[str, Any]], output: Path, as_json: bool) -> None:
    """Run, and print the summary as a table, or as JSON with all else on stderr.

    Raises:
        SystemExit: 130 after an interrupt, with a line.
    """
    elsewhere = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    try:
        with elsewhere:
            summary = run()
    except KeyboardInterrupt:
        click.echo("\nstopped; no process is left, the copied data stays", err=True)
        raise SystemExit(130) from None
    if as_json:
        click.echo(json.dumps(summary))
    else:
        if "accuracy" in summary:
            click.echo("\n" + "\n".join(results.told(summary)))
        elif "report" in summary:
            click.echo(f"\n  report      {results.shown(summary['report'])}")
        seconds = f"{summary['seconds']:.0f} seconds"
        click.echo(f"\n  {seconds}; all of it lies in {results.shown(output)}/")
        if "bundle" in summary:
            picture = results.example(output)
            click.echo(f"  try it: kfp-ddp predict {results.shown(summary['bundle'])} {picture}")
