"""`kfp-ddp demo`: the whole pipeline on this machine."""

from pathlib import Path

import click


@click.command("demo")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("demo-output"),
    show_default=True,
    help="Folder for the bucket, the synced data and the results.",
)
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True, help="DDP ranks.")
@click.option("--epochs", type=int, default=None, help="Epochs instead of the demo's own number.")
def command(output: Path, ranks: int, epochs: int | None) -> None:
    """Run bucket, sync, DDP training, evaluation, gate and export for real, without a cluster."""
    from kfp_ddp.demo.run import run

    click.echo(f"train_resnet.yaml through kfp.local, {ranks} ranks on this machine\n")
    try:
        summary = run(output.resolve(), ranks, {} if epochs is None else {"epochs": epochs})
    except KeyboardInterrupt:
        click.echo("\nstopped; no process is left, the synced data stays", err=True)
        raise SystemExit(130) from None
    lines = {
        "accuracy": f"{summary['accuracy']:.1%} of the validation images",
        "files": f"{summary['files']:,} in the dataset, {summary['files_copied']:,} copied",
        "speed": f"{summary['images_per_second']:,.0f} images/s on {ranks} ranks",
        "bundle": _shown(summary["bundle"]) if summary["blessed"] else summary["reason"],
        "report": _shown(summary["report"]),
        "loss curve": _shown(summary["loss_curve"]),
    }
    click.echo("")
    for name, value in lines.items():
        click.echo(f"  {name:<12}{value}")
    click.echo(f"\n  {summary['seconds']:.0f} seconds; all of it lies in {_shown(output)}/")


def _shown(path: str | Path) -> str:
    """The path as a person would type it from here."""
    here = Path.cwd()
    full = Path(path).resolve()
    return str(full.relative_to(here) if full.is_relative_to(here) else full)
