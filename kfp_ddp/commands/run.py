"""`kfp-ddp run`: the pipeline on photographs of one's own."""

from pathlib import Path
from typing import Any

import click


@click.command("run")
@click.argument("source")
@click.option("--local", is_flag=True, help="Run on this machine, without a cluster.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("run-output"),
    show_default=True,
    help="Folder for the copied data and the results: a new one, or that of an earlier run.",
)
@click.option(
    *("--set", "words"),
    multiple=True,
    metavar="KEY=VALUE",
    help="A parameter of the pipeline or a setting in it, such as epochs=10 or precision=bf16. "
    "May be repeated.",
)
@click.option(
    *("--file", "-f"),
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML file of such settings, under those of --set.",
)
@click.option("--ranks", type=click.IntRange(1), help="Processes that train.  [default: by cores]")
@click.option("--json", "as_json", is_flag=True, help="Print the summary alone, as JSON.")
def command(
    source: str,
    local: bool,
    output: Path,
    words: tuple[str, ...],
    file: Path | None,
    ranks: int | None,
    as_json: bool,
) -> None:
    """Train on SOURCE: a folder of photographs, or gs:// or s3://, with a folder for each class.

    What nobody sets is chosen by what is there: images, cores, memory and GPU.

    kfp-ddp run ./photos --local --set epochs=20 --set model=resnet18
    """
    from kfp_ddp.base.errors import InputError

    if not local:
        import kfp_ddp

        yaml = Path(kfp_ddp.__file__).parent / "compiled" / "train_resnet.yaml"
        raise InputError(
            "runs on a cluster are started in its own UI as yet: give --local to run here, or "
            f"upload {yaml} (Pipelines, Upload pipeline)"
        )
    from kfp_ddp.local.installed import require

    require("local")
    from kfp_ddp.local.photographs import train
    from kfp_ddp.local.results import example, shown
    from kfp_ddp.local.session import conduct

    def begin() -> dict[str, Any]:
        return train(source, output.resolve(), words, file, ranks or 0)

    summary = conduct(begin, output, as_json)
    if "bundle" in summary and not as_json:
        picture = example(output)
        click.echo(f"  try it: kfp-ddp predict {shown(summary['bundle'])} {picture}")
