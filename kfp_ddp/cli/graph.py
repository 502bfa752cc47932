"""`kfp-ddp graph`: the Mermaid flowchart of a compiled pipeline."""

from pathlib import Path

import click


@click.command("graph")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--mermaid", is_flag=True, hidden=True, help="No effect: the output is Mermaid.")
@click.option(
    *("--output", "-o"),
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; standard output without it.",
)
def command(file: Path, mermaid: bool, output: Path | None) -> None:
    """Draw the pipeline in FILE, a YAML of kfp's compiler, as a Mermaid flowchart for Markdown.

    kfp-ddp graph compiled/train_resnet.yaml -o steps.mmd
    """
    from kfp_ddp.core.errors import StorageError
    from kfp_ddp.pipelines import graph

    flowchart = graph.mermaid(file)
    if output is None:
        click.echo(flowchart, nl=False)
        return
    try:
        output.write_text(flowchart, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{output} cannot be written: {error.strerror}; give a path in a writable folder"
        ) from None
