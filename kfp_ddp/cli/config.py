"""`kfp-ddp config`: settings of this program, and the origin of each value."""

import click

from kfp_ddp.cli.options import AS_JSON, echo, echo_json
from kfp_ddp.core import config


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
    them), an environment variable (KFP_DDP_KFP_NAMESPACE), or a line of ./kfp-ddp.yaml or
    ~/.config/kfp-ddp/config.yaml (kfp_namespace: kubeflow). The first of these is used. The file
    of the folder may set a host or a login only if your own settings name the same host.

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
    values = {
        name: str(one.value).lower() if isinstance(one.value, bool) else str(one.value)
        for name, one in settings.items()
    }
    width, most = max(map(len, settings)), max(map(len, values.values()))
    for name, value in values.items():
        text = f"{value:{most}}  ({settings[name].origin})" if origin else value
        echo(f"{name:{width}}  {text}".rstrip())
