"""The `kfp-ddp` program: the modules of `kfp_ddp.cli` are imported when a command is called."""

import importlib
import io
import os
import sys
from gc import freeze, set_threshold
from typing import NoReturn

import click

from kfp_ddp import __version__

SECTIONS = {
    "Train": {
        "run": "Train on a folder or bucket of images, or run any pipeline, here or on KFP.",
        "settings": "List the settings of a run, with defaults and meaning.",
        "predict": "Classify pictures with the model of a bundle.",
        "serve": "Serve the model of a bundle over HTTP and gRPC.",
        "report": "Write the report of a run: verdict, metrics, curves, mistakes.",
        "demo": "Run the full pipeline locally: bucket, sync, DDP, evaluation, export.",
    },
    "Runs on Kubeflow Pipelines": {
        "upload": "Upload a pipeline, if its content has changed.",
        "runs": "List the runs.",
        "status": "Show the steps of a run and the progress of its training.",
        "logs": "Print the logs of a run's steps.",
        "describe": "Show why a run failed, and what to do next.",
        "cancel": "Cancel a run and delete its job.",
        "retry": "Resume a failed run from its newest checkpoint.",
        "compare": "Compare runs: settings, metrics, curves.",
        "download": "Download the bundle and the reports of a run.",
    },
    "Schedules and models": {
        "schedule": "Create, list, pause and replace recurring runs.",
        "models": "List the exported models and their champions.",
        "promote": "Make an exported version the champion.",
        "rollback": "Restore the previous champion.",
        "sign": "Sign a published bundle.",
        "verify": "Verify a bundle and its signature.",
    },
    "Pipelines and cluster": {
        "compile": "Compile pipelines to YAML, or check that the files are up to date.",
        "install": "Create PVCs, permissions and our source in a namespace.",
        "uninstall": "Delete what install made in a namespace, without the PVCs.",
        "gc": "Delete copies of datasets and published bundles that nobody uses.",
        "doctor": "Check that a cluster and namespace have what the components need.",
        "config": "Show the settings of this program, and the origin of each.",
        "sync": "Download a bucket prefix as a version: verified, resumable, incremental.",
        "manifest": "Print the job of a launch, without creating it.",
    },
}
EXIT_CODES = {
    "0": "success",
    "1": "the run failed, or a server or storage does not answer: a retry may help",
    "2": "the input is invalid, or KFP refuses it: nothing was started",
    "130": "interrupted",
    "143": "the run was cancelled",
}
SYNONYMS = {"train": "run"}
"""Names of commands in other programs."""
COMMANDS = {name: text for section in SECTIONS.values() for name, text in section.items()}
MODULES = {
    **dict.fromkeys(("status", "logs", "describe", "cancel", "retry"), "runs"),
    **dict.fromkeys(("compare", "download", "report"), "results"),
    **dict.fromkeys(("promote", "rollback", "sign", "verify", "gc"), "models"),
    **dict.fromkeys(("compile", "upload"), "pipelines"),
    **dict.fromkeys(("install", "uninstall", "doctor"), "cluster"),
    "manifest": "jobs",
    "settings": "config",
    "demo": "run",
    "predict": "serve",
}
"""Modules that are not named after their commands."""


class LazyGroup(click.Group):
    """A group that lists its commands without importing them: `--help` stays under 100 ms."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """Import the command's module; raise UsageError, with a similar name, if there is none."""
        if cmd_name not in COMMANDS:
            from kfp_ddp.core.settings import nearest  # only an error needs it

            hint = f"The commands are {', '.join(COMMANDS)}."
            if near := nearest(cmd_name, [*SYNONYMS, *COMMANDS]):
                hint = f"Did you mean '{SYNONYMS.get(near, near)}'?"
            raise click.UsageError(f"No such command '{cmd_name}'. {hint}", ctx)
        module = importlib.import_module(f"kfp_ddp.cli.{MODULES.get(cmd_name, cmd_name)}")
        commands = (one for one in vars(module).values() if isinstance(one, click.Command))
        return next(command for command in commands if command.name == cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of commands without importing them."""
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()), col_max=12)
        with formatter.section("Exit codes"):
            formatter.write_dl(list(EXIT_CODES.items()))


SHOWN = {"help_option_names": ["-h", "--help"], "show_default": True}


@click.group(cls=LazyGroup, context_settings=SHOWN)
@click.version_option(__version__, prog_name="kfp-ddp")
def app() -> None:
    """Train with PyTorch DDP from Kubeflow Pipelines: bucket to evaluated, exported model.

    A run exports its model as a bundle, a folder with everything that is needed to serve it. The
    champion is the exported version with which the next model is compared. A rank is one process of
    a training.

    \b
    kfp-ddp demo                     the full pipeline, on this machine
    kfp-ddp run ./photos --local     your images, a folder for each class
    """
    from kfp_ddp.cli.options import echo
    from kfp_ddp.core import config

    if os.path.exists(config.RETIRED) and not os.environ.get(config.FILE):
        echo(
            f"{config.RETIRED} of this folder is not read any more: move what you need of it to "
            f"{config.file()}, or name a file of settings by {config.FILE}",
            err=True,
        )


def main() -> NoReturn:
    """Run the program; a KfpDdpError is one line on stderr, and its type is the exit code."""
    from kfp_ddp.cli.options import echo
    from kfp_ddp.core.errors import UNIX_ONLY, KfpDdpError

    if isinstance(sys.stdout, io.TextIOWrapper):  # a code page lacks marks and names
        sys.stdout.reconfigure(encoding="utf-8")
    set_threshold(20_000)  # SDKs make many objects that stay: 0.1 s less for botocore
    try:
        code = app.main(prog_name="kfp-ddp", standalone_mode=False)
    except KfpDdpError as error:
        echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if error.name not in ("fcntl", "resource"):
            raise
        echo(f"error: {UNIX_ONLY}", err=True)
        sys.exit(2)
    except click.Abort:
        echo("interrupted", err=True)
        sys.exit(130)
    if "triton" not in sys.modules:  # which reports what is not collected as leaks
        freeze()  # saves 30 ms of garbage collection at exit
    sys.exit(code)
