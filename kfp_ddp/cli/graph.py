"""`kfp-ddp graph`: a compiled pipeline as a picture."""

from pathlib import Path

import click


@click.command("graph")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--mermaid", is_flag=True, help="Write a Mermaid flowchart, for Markdown.")
@click.option(
    *("--output", "-o"),
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; standard output without it.",
)
def command(file: Path, mermaid: bool, output: Path | None) -> None:
    """Draw the pipeline in FILE, a YAML of kfp's compiler: steps, groups, loops and conditions.

    kfp-ddp graph compiled/train_resnet.yaml -o steps.svg
    """
    from kfp_ddp.core.errors import StorageError
    from kfp_ddp.pipelines import mermaid as flowchart
    from kfp_ddp.pipelines import picture

    drawn = flowchart.mermaid(file) if mermaid else picture.svg(file)
    if output is None:
        click.echo(drawn, nl=False)
        return
    try:
        output.write_text(drawn, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{output} cannot be written: {error.strerror}; give a folder that is there and yours"
        ) from None
