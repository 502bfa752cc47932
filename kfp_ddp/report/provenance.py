"""Where the model comes from, what was set, and what is wrong with its data."""

from collections.abc import Mapping
from html import escape
from typing import Any

from kfp_ddp.core import packed
from kfp_ddp.report.material import Material
from kfp_ddp.report.pictures import is_number
from kfp_ddp.report.text import facts
from kfp_ddp.training.config import TrainConfig

_PLACES = frozenset({"data", "output_dir", "cache_dir", "run_id"})
"""Settings that say where it ran, and nothing of the model."""


def problems(found: Material) -> str:
    """What is wrong with the data; '' where nothing is known to be."""
    said = list(found.left.dataset.problems)
    events = (e for e in found.events if e.get("event") == "step")
    skipped = sum(e["skipped_images"] for e in events if is_number(e.get("skipped_images")))
    if found.result.skipped:
        said.append(f"{found.result.skipped} images of this split cannot be read and are left out")
    if skipped:
        said.append(f"training met images that cannot be read, {skipped:,.0f} times in the steps "
                    "it told of")  # fmt: skip
    lines = "".join(f"<li>{escape(each)}</li>" for each in said)
    return f"<h2>Problems of the dataset</h2><ul>{lines}</ul>" if said else ""


def provenance(found: Material) -> str:
    """Digests, machine, and the settings: those that were changed, and the rest in a fold."""
    result, dataset = found.result, found.left.dataset
    rows = {
        "checkpoint": result.checkpoint,
        "checkpoint sha256": result.checkpoint_digest,
        "dataset": f"{dataset.source}, {dataset.files:,} files, {dataset.bytes / 1e6:,.1f} MB"
        if dataset.source
        else "",
        "dataset digest": result.dataset_digest or "not recorded beside the data",
        "samples digest": result.samples_digest,
        "image size": f"{result.image_size} x {result.image_size}",
        "evaluated on": f"{result.hardware or result.device}, in {result.seconds:.1f} s",
    }
    changed, default = _settings(found.config)
    parts = [f"<h2>Where it comes from</h2>{facts({k: v for k, v in rows.items() if v})}"]
    if changed:
        parts.append(f"<h3>Settings of the training that are not the default</h3>{facts(changed)}")
    if default:
        parts.append(
            f"<details><summary>{len(default)} settings as they are by default, or of the place"
            f"</summary>{facts(default)}</details>"
        )
    return "".join(parts)


def _settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of the model that differ from the default, and the others."""
    changed: dict[str, Any] = {}
    default: dict[str, Any] = {}
    for name, value in config.items():
        known = TrainConfig.model_fields.get(name)
        same = known is not None and known.default == value
        (default if same or name in _PLACES else changed)[name] = packed.in_words(value)
    return changed, default
