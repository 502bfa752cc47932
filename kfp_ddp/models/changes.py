"""The `changes` step: the same data and settings are not trained on twice."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.step import step
from kfp_ddp.core.text import cell
from kfp_ddp.models import attempts
from kfp_ddp.models.bundle import check_model_name
from kfp_ddp.storage.destination import open_destination

if TYPE_CHECKING:
    from kfp import dsl


class Changed(NamedTuple):
    """Whether there is something new to train, and the name of the attempt."""

    Output: bool
    attempt: str


@step
def run(
    *,
    digest: str,
    destination: str,
    model_name: str,
    training: Mapping[str, Any],
    gate: Mapping[str, Any],
    job: Mapping[str, Any],
    change_summary: "dsl.Markdown",
) -> Changed:
    """Look for a note of the same data and settings, and say what it says.

    Raises:
        InputError: no destination, or one that cannot be written.
    """
    if not destination:
        raise InputError(
            "destination is empty, so nothing tells what was trained before: give the place that "
            "models are exported to"
        )
    check_model_name(model_name)
    open_destination(destination).prepare()  # a folder is made, so that the champion may be missing
    where = open_destination(f"{destination.rstrip('/')}/{model_name}")
    attempt = attempts.fingerprint(digest, training, gate, str(job.get("image", "")))
    found = attempts.unchanged(where, attempt)
    data = f"dataset {digest[:12]}"
    if found is None:
        said = f"something new to train: {data} was not trained on with these settings"
    else:
        said = f"nothing new: {data} was trained on with the same settings: {found.words}"
    print(said, flush=True)
    more = 'To train all the same, change a setting, such as training={"seed": 1}.'
    text = cell(f"{said[0].upper()}{said[1:]}.") + (f"\n\n{more}" if found else "")
    Path(change_summary.path).write_text(f"{text}\n", encoding="utf-8")
    change_summary.metadata.update({"changed": found is None, "reason": said})
    return Changed(found is None, attempt)
