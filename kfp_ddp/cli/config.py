"""`kfp-ddp config`: what is set once, and where each value is from."""

import click

from kfp_ddp.cli.options import AS_JSON, echo_json
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
    """Settings that are given once: flag > environment > file > default.

    A setting is a flag of the commands that use it (--kfp-namespace, whether or not their help
    lists it), a variable (KFP_DDP_KFP_NAMESPACE), or a line of ./kfp-ddp.yaml or
    ~/.config/kfp-ddp/config.yaml (kfp_namespace: kubeflow), the first of these that has it.

    Of logins the first that is set is used: a token, a cookie, a user of Dex, Identity-Aware Proxy,
    the token of the pod that this runs in. Secrets are read from files, or from KFP_DDP_TOKEN,
    KFP_DDP_COOKIE and KFP_DDP_PASSWORD, and never printed.
    """


@command.command("show")
@click.option("--origin", is_flag=True, help="Tell where each value is from.")
@AS_JSON
def show(origin: bool, as_json: bool) -> None:
    """Print the settings that commands run with here."""
    found = config.resolved()
    if as_json:
        echo_json({name: each._asdict() for name, each in found.items()})
        return
    values = {
        name: str(each.value).lower() if isinstance(each.value, bool) else str(each.value)
        for name, each in found.items()
    }
    width, most = max(map(len, found)), max(map(len, values.values()))
    for name, value in values.items():
        told = f"{value:{most}}  ({found[name].origin})" if origin else value
        click.echo(f"{name:{width}}  {told}".rstrip())
