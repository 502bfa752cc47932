"""`kfp-ddp settings`: what a run can be told, from the models that check it."""

import shutil

import click

from kfp_ddp.cli.options import AS_JSON, echo_json
from kfp_ddp.core.errors import InputError


@click.command("settings")
@click.argument("word", default="")
@AS_JSON
def command(word: str, as_json: bool) -> None:
    """List the settings of a run, or those with WORD in name or meaning, with their defaults.

    Each is given to `run` by --set name=value or a line of the file of -f. In the form of KFP's UI
    it is a box of its own, or part of the mapping that is the title of its table.

    \b
    kfp-ddp settings learning
    kfp-ddp run ./photos --local --set learning_rate=0.05
    """
    from kfp_ddp.checks.form import described_settings
    from kfp_ddp.core.settings import ALIASES, nearest

    every = list(described_settings())
    part = word.casefold()
    rows = [
        row
        for row in every
        if part in f"{row['name']} {row['meaning']}".casefold() or row["name"] == ALIASES.get(part)
    ]
    if not rows:
        near = nearest(word, [row["name"] for row in every])
        raise InputError(f"no setting has {word!r}{near and f'; did you mean {near!r}?'}")
    if as_json:
        echo_json(rows)
        return
    formatter = click.HelpFormatter(width=min(shutil.get_terminal_size().columns, 120))
    for mapping in dict.fromkeys(row["mapping"] for row in rows):
        with formatter.section(mapping or "boxes of the form"):
            table = [
                (f"{row['name']}={row['default']}", " ".join((row["meaning"], row["choices"])))
                for row in rows
                if row["mapping"] == mapping
            ]
            formatter.write_dl(table, col_max=30)
    click.echo(formatter.getvalue().strip("\n"))
