"""The report of a model: one HTML file of what was measured, decided and made. Free of torch.

It is made from the folder of an evaluation, with the verdict beside it, and from a bundle; made
again when one of them is new.
"""

from pathlib import Path

from kfp_ddp.core.files import atomic_write
from kfp_ddp.core.run_folder import REPORT
from kfp_ddp.report import ingredients
from kfp_ddp.report.bundle import bundle as _bundle
from kfp_ddp.report.calibration import calibration
from kfp_ddp.report.classes import classes, slices
from kfp_ddp.report.confusion import confusion
from kfp_ddp.report.head import head, test_split
from kfp_ddp.report.material import gather
from kfp_ddp.report.mistakes import mistakes
from kfp_ddp.report.pictures import page
from kfp_ddp.report.provenance import problems, provenance
from kfp_ddp.report.time_spent import where_the_time_went
from kfp_ddp.report.training import training, training_page

INGREDIENTS = ingredients.FILE

__all__ = ["INGREDIENTS", "html", "training_page", "write"]


def html(folder: Path, bundle: Path | None = None) -> str:
    """The report.

    Args:
        folder: Of an evaluation, with the verdict where there is one.
        bundle: Of the model that it is of; None for none.

    Raises:
        InputError: there is no evaluation, or something else instead.
    """
    found = gather(folder, bundle)
    sections = (
        head, test_split, problems, training, where_the_time_went, calibration, confusion, classes,
        slices, mistakes, _bundle, provenance,
    )  # fmt: skip
    title = f"{found.name}: {found.result.accuracy:.2%}"
    return page(title, "".join(section(found) for section in sections))


def write(folder: Path, bundle: Path | None = None, root: Path | None = None) -> str:
    """The report, which is also written beside the evaluation.

    Args:
        folder: Of an evaluation.
        bundle: Of the model that it is of; None for none.
        root: A folder above, below which no link is followed; None for `folder`.

    Raises:
        InputError: as `html` does.
        OSError: it cannot be written.
    """
    document = html(folder, bundle)
    with atomic_write(folder / REPORT, root=root or folder) as file:
        file.write(document.encode())
    return document
