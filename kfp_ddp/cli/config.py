"""`kfp-ddp config` and `settings`: settings of this program, and of a run."""

import shutil
from collections.abc import Container

import click

from kfp_ddp.cli.options import AS_JSON, echo, echo_json
from kfp_ddp.core import config
from kfp_ddp.core.errors import InputError


class _Group(click.Group):
    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the settings."""
        with formatter.section("Settings"):
            formatter.write_dl(
                [(name, field.metadata["description"]) for name, field in config.FIELDS.items()]
            )


@click.group("config", cls=_Group)
def command() -> None:
    """Show the settings of this program: flag > environment > file > default.

    A setting is a flag of the commands that use it (--kfp-namespace; help does not list all of
    them), an environment variable (KFP_DDP_KFP_NAMESPACE), or a line of
    ~/.config/kfp-ddp/config.yaml (kfp_namespace: kubeflow), or of the file that KFP_DDP_CONFIG
    names in its place. The first of these is used. No settings are read from the current folder.

    The first configured login is used: a token, a cookie, a Dex user, Identity-Aware Proxy, the
    token of the current pod. Secrets are read from files, or from KFP_DDP_TOKEN, KFP_DDP_COOKIE
    and KFP_DDP_PASSWORD, and are never printed.
    """


@command.command("show")
@click.option("--origin", is_flag=True, help="Show the origin of each value.")
@AS_JSON
def show(origin: bool, as_json: bool) -> None:
    """Print the current settings."""
    settings = config.resolved()
    if as_json:
        echo_json({name: setting._asdict() for name, setting in settings.items()})
        return
    texts = {name: _value_text(setting.value) for name, setting in settings.items()}
    name_width = max(map(len, settings))
    text_width = max(map(len, texts.values()))
    for name, text in texts.items():
        if origin:
            text = f"{text:{text_width}}  ({settings[name].origin})"
        echo(f"{name:{name_width}}  {text}".rstrip())


def _value_text(value: object) -> str:
    """Return a value as it is written in the file."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


@click.command("settings")
@click.argument("word", default="")
@AS_JSON
def settings(word: str, as_json: bool) -> None:
    """List the settings of a run, or those with WORD in name or meaning, with their defaults.

    WORD may also be a mapping of the form, such as sweep, gate or job: all its settings.

    Each is given to `run` by --set name=value or a line of the file of -f. In the form of KFP's UI
    it is a box of its own, or part of the mapping that is the title of its table.

    \b
    kfp-ddp settings learning
    kfp-ddp run ./photos --local --set learning_rate=0.05
    """
    from kfp_ddp.core.settings import ALIASES, nearest
    from kfp_ddp.pipelines.form import form_of
    from kfp_ddp.plan.form import SUBJECTS, described_settings

    parameters = form_of("train_resnet").parameters
    boxes = {name: spec.get("defaultValue", "") for name, spec in parameters.items()}
    # KFP has no whole numbers.
    whole = {name: int(value) for name, value in boxes.items() if isinstance(value, float)}
    known = list(described_settings(boxes | whole))
    part = word.casefold()
    alias = ALIASES.get(part)
    meant = {part, alias}
    rows = [row for row in known if part in _text(row) or meant & {row["name"], row["mapping"]}]
    if not rows:
        near = nearest(word, [*SUBJECTS, *(row["name"] for row in known)])
        question = f"; did you mean {near!r}?" if near else ""
        raise InputError(f"no setting has {word!r}{question}")
    if as_json:
        echo_json(rows)
    else:
        _print_tables(rows, boxes)


def _text(row: dict[str, str]) -> str:
    return f"{row['name']} {row['meaning']}".casefold()


def _print_tables(rows: list[dict[str, str]], boxes: Container[str]) -> None:
    """Print a table for the form's boxes, one for each mapping, and one for other boxes."""
    formatter = click.HelpFormatter(width=min(shutil.get_terminal_size().columns, 120))
    sections: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        own = "boxes of the form" if row["name"] in boxes else "boxes of other pipelines"
        title = row["mapping"] or own
        cells = (f"{row['name']}={row['default']}", f"{row['meaning']} {row['choices']}")
        sections.setdefault(title, []).append(cells)
    for title, table in sections.items():
        with formatter.section(title):
            formatter.write_dl(table, col_max=30)
    click.echo(formatter.getvalue().strip("\n"))
