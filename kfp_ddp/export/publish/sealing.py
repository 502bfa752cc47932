"""A bundle with what was decided of it: verdict, report and lineage under the same manifest."""

import shutil
from pathlib import Path

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.run_folder import REPORT, VERDICT
from kfp_ddp.models import bundle
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.models.lineage import FILE as LINEAGE
from kfp_ddp.models.lineage import Lineage

_OURS = frozenset({LINEAGE, VERDICT, REPORT})


def sealed(folder: Path, lineage: Lineage, verdict: Path | None, report: Path | None) -> Path:
    """Make the bundle anew with these files in it, unless it has them already.

    Args:
        folder: A whole bundle, `<run_dir>/bundle`; the new one takes its place.
        lineage: Who publishes it, and whom it was compared with.
        verdict: What the gate left; None for no verdict.
        report: The report, where there is one.

    Returns:
        The folder.

    Raises:
        InputError: the bundle is not whole, or its folder cannot be written.
    """
    whole = bundle.intact(folder)
    if not whole and not bundle.intact(folder, but=_OURS):  # a bucket may have got some of these
        raise InputError(f"{folder} is no whole bundle: run export again")
    more = {VERDICT: verdict, REPORT: report if report is not None and report.is_file() else None}
    there = {name: path for name, path in more.items() if path is not None}
    if (
        whole
        and lineage.is_in(folder)
        and all(_same(path, folder / name) for name, path in there.items())
    ):
        return folder
    dataset_digest = Evaluation.read(folder / bundle.METRICS).dataset_digest
    skipped = {bundle.MANIFEST, bundle.SUCCESS, *_OURS}
    with bundle.replacing(folder.parent) as made:
        for name in bundle.files(folder):
            if name not in skipped:
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                bundle.link(folder / name, made / name)
        for name, path in there.items():
            shutil.copyfile(path, made / name)
        bundle.write_json(made / LINEAGE, lineage.record(dataset_digest))
    return folder


def _same(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()
