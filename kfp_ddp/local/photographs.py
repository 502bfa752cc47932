"""Train on photographs of one's own, with what fits this machine."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kfp_ddp.core.errors import InputError
from kfp_ddp.local import engine, machine, results, survey
from kfp_ddp.local.choice import Choice, choose
from kfp_ddp.pipelines.form import check_arguments, form_of, named_after

_FIXED = {
    "source": "is the argument SOURCE",
    "backend": "is local with --local",
    "nodes": "is 1 with --local",
    "gpus_per_node": "is what this machine has with --local",
}


def train(
    source: str, output: Path, words: Sequence[str], file: Path | None, ranks: int
) -> dict[str, Any]:
    """Run the pipeline on a source, leave what it made in `output`, and return the summary.

    Args:
        source: A folder, or an address.
        output: A new or empty folder, or that of an earlier run.
        words: Settings, as `key=value`.
        file: A YAML file of settings under them; None for none.
        ranks: Processes that train; 0 to choose.

    Raises:
        KfpDdpError: settings, source or output cannot be used, or the pipeline failed.
    """
    started = time.monotonic()
    form = form_of("train_resnet")
    arguments = form.read(file, words)
    for name, why in _FIXED.items():
        if name in arguments:
            raise InputError(f"{name} cannot be set: it {why}")
    if ranks and "nproc_per_node" in arguments.get("job", {}):
        raise InputError("nproc_per_node and --ranks are one setting: give one of them")
    source = survey.located(source)
    if "://" not in source:
        _check_apart(Path(source), output)
    found = survey.look(source, arguments)
    computer = machine.here()
    choice = choose(found, computer, arguments, ranks)
    everything = {"model_name": named_after(source), **choice.arguments}
    everything |= {"source": source, "backend": "local"}
    check_arguments(form.pipeline, form.completed(everything))
    engine.prepare(output)
    click.echo(f"{found}; {computer}: {_in_words(choice)}")
    click.echo("".join(f"note: {note}\n" for note in found.notes))
    threads = {"OMP_NUM_THREADS": str(max(1, computer.cores // choice.ranks))}
    return engine.run(output, everything, threads, started)


def _check_apart(source: Path, output: Path) -> None:
    """Refuse a source and an output one of which is in the other."""
    folder = source.resolve()
    if folder.is_relative_to(output) or output.is_relative_to(folder):
        raise InputError(
            f"--output {output} and the photographs in {folder} lie in each other; "
            "name an output folder beside them"
        )


def _in_words(choice: Choice) -> str:
    """What will be trained, and how long it may take, in one line."""
    arguments = choice.arguments
    size = arguments["training"].get("image_size")
    parts = [
        f"{arguments.get('model', 'the model')} of recipe {recipe}"
        if (recipe := arguments.get("recipe", "none")) != "none"
        else str(arguments["model"])
    ]
    parts[0] += f" at {size} px" if size else ""
    if epochs := arguments.get("epochs"):
        parts.append(f"{epochs} epochs")
    if batch := arguments.get("batch_size"):
        parts.append(f"batch {batch}")
    parts.append(results.ranks(choice.ranks))
    if choice.minutes:
        parts.append(f"about {max(1, round(choice.minutes))} min of training")
    return ", ".join(parts)
