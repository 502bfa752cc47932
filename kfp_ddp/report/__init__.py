"""Report of a model: one HTML file, written again by each step."""

from pathlib import Path

from kfp_ddp.core.files import atomic_write
from kfp_ddp.core.run_folder import REPORT
from kfp_ddp.report import sections
from kfp_ddp.report.appraisal import appraise
from kfp_ddp.report.data import REPORT_DATA, Material
from kfp_ddp.report.render import render
from kfp_ddp.report.training import time_section, training_curves, training_page

__all__ = ["REPORT_DATA", "html", "training_page", "write"]

_MAX_CONFUSIONS = 12
_SURE = 0.5
"""Confidence above which a mistake is a confident one."""


def html(folder: Path, bundle: Path | None = None) -> str:
    """Return the report of an evaluation and its verdict, by their folder, and of a bundle."""
    material = Material.read(folder, bundle)
    result = material.result
    data = material.data
    verdict = material.verdict
    reason = str(verdict.get("reason", ""))
    classes, class_notes = sections.classes(result)
    changed, default = sections.settings(material.config)
    perfect = result.correct == result.samples
    return render(
        "evaluation.html",
        title=f"{material.name}: {result.accuracy:.2%}",
        material=material,
        result=result,
        data=data,
        title_facts=sections.title_facts(material),
        verdict=verdict,
        appraisal=appraise(material, verdict),
        reason=reason.removeprefix("not blessed: ").removeprefix("blessed: "),
        rules=sections.rules(verdict),
        headline=sections.headline(material),
        compared=result.compared,
        changes=sections.changes(result),
        test_headline=sections.quality(data.test) if data.test else [],
        problems=sections.problems(material),
        curves=training_curves(material.events),
        time=time_section(material.events),
        calibration=sections.calibration(result),
        doubt=sections.doubt(material),
        confusion=None if perfect else sections.confusion(material),
        confusions=[] if perfect else material.confusions[:_MAX_CONFUSIONS],
        classes=classes,
        class_notes=class_notes,
        slices=sections.slices(result),
        surest=[one for one in data.surest if one.confidence > _SURE],
        exported=sections.exported(material.bundle),
        provenance=sections.provenance(material),
        changed_settings=changed,
        default_settings=default,
    )


def write(folder: Path, bundle: Path | None = None, root: Path | None = None) -> str:
    """Write the report beside the evaluation and return it; no link below `root` is followed."""
    document = html(folder, bundle)
    with atomic_write(folder / REPORT, root=root or folder) as file:
        file.write(document.encode())
    return document
