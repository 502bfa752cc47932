"""The `kfp-ddp` program: each command lives in `kfp_ddp.cli` and is imported when called."""

import gc
import importlib
import sys
from typing import NoReturn

import click

from kfp_ddp import __version__

SECTIONS = {
    "Train": {
        "run": "Train on a folder or a bucket of photographs, or run any pipeline: here or on KFP.",
        "predict": "Tell what pictures show, with the model of a bundle.",
        "trace": "Trace the next steps of one rank of a training that runs.",
        "serve": "Answer requests with the model of a bundle, over HTTP and gRPC.",
        "report": "Make the report of a run anew: verdict, figures, curves, mistakes.",
        "demo": "Run the whole pipeline on this machine: bucket, sync, DDP, evaluation, export.",
    },
    "Runs on Kubeflow Pipelines": {
        "upload": "Upload a pipeline; a new version only where its content changed.",
        "runs": "List the runs.",
        "status": "Show the steps of a run, and how far its training is.",
        "logs": "Print the log of a run's steps.",
        "describe": "Tell why a run failed, and what to do next.",
        "cancel": "End a run and its job.",
        "retry": "Let a failed run go on from its newest checkpoint.",
        "compare": "Set runs side by side: settings, metrics, curves.",
        "download": "Bring a run's bundle and reports to a folder.",
        "tensorboard": "Show the curves of a run in TensorBoard.",
    },
    "Schedules and models": {
        "schedule": "Create, list, pause and replace recurring runs.",
        "models": "List the exported models and their champions.",
        "promote": "Make an exported version the champion.",
        "rollback": "Make the champion before this one the champion again.",
        "sign": "Put a signature into a published bundle.",
        "verify": "Hold a bundle against its manifest and its signature.",
    },
    "Pipelines and cluster": {
        "compile": "Write the YAML of our pipelines or of your own, or check that it is fresh.",
        "graph": "Draw a compiled pipeline, as SVG or Mermaid.",
        "install": "Put claims and rights into a namespace.",
        "netcheck": "Measure the network between the pods of a job, and name what is slow.",
        "doctor": "Check that a cluster and namespace have what the components need.",
        "config": "Show the settings of this program, and where each is from.",
        "sync": "Bring a bucket prefix to a folder: verified, resumable, only what changed.",
        "manifest": "Print the job that a launch would create, without creating it.",
    },
}
EXIT_CODES = {
    "0": "done",
    "1": "what ran failed, or a server or storage does not answer: trying again may help",
    "2": "what was given cannot be used, or KFP refuses it: nothing was begun",
    "130": "interrupted",
    "143": "the run was terminated",
}
ELSEWHERE = {"train": "run"}
"""What other programs call one of these."""
COMMANDS = {name: text for section in SECTIONS.values() for name, text in section.items()}


class LazyGroup(click.Group):
    """A group that lists its commands without importing them: `--help` stays under 100 ms."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """Import the command's module.

        Raises:
            UsageError: for a name that is not in the table, with one that is near.
        """
        if cmd_name not in COMMANDS:
            from difflib import get_close_matches  # only an error needs it

            hint = f"There are {', '.join(COMMANDS)}."
            for near in get_close_matches(cmd_name, [*ELSEWHERE, *COMMANDS], n=1):
                hint = f"Did you mean '{ELSEWHERE.get(near, near)}'?"
            raise click.UsageError(f"No such command '{cmd_name}'. {hint}", ctx)
        module = importlib.import_module(f"kfp_ddp.cli.{cmd_name.replace('-', '_')}")
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of commands from its own texts, importing nothing."""
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()), col_max=12)
        with formatter.section("Exit codes"):
            formatter.write_dl(list(EXIT_CODES.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kfp-ddp")
def app() -> None:
    """Train with PyTorch DDP from Kubeflow Pipelines: bucket to evaluated, exported model.

    A run exports its model as a bundle, a folder of all that is needed to serve it. The champion is
    the exported version that the next model has to beat. A rank is one process of a training.

    \b
    kfp-ddp demo                     all of it, on this machine
    kfp-ddp run ./photos --local     your photographs, a folder for each class
    """


def main() -> NoReturn:
    """Run the program; an error of ours is one line on stderr, and its type is the exit code."""
    from kfp_ddp.core.errors import KfpDdpError

    try:
        code = app.main(prog_name="kfp-ddp", standalone_mode=False)
    except KfpDdpError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    gc.freeze()  # or the interpreter's end looks for garbage in all that was imported, for 30 ms
    sys.exit(code)
