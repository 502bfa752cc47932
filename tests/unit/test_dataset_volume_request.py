from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kfp_ddp.components.dataset_volume.component import dataset_volume
from kfp_ddp.datasets.access import EachNode
from kfp_ddp.datasets.volume.request import Request

INPUTS = {"dataset": "digits", "digest": "5" * 64, "path": "/data/versions/5", "claim": "data"}


def step(folder: Path, **inputs: Any) -> Any:
    """The component as a program calls it, outside of any cluster."""
    report = SimpleNamespace(path=str(folder / "report.md"))
    return dataset_volume.python_func(volume_report=report, **INPUTS | inputs)


def test_options_reach_the_request() -> None:
    given = {"keep_claims": 1.0, "wait_seconds": 60, "storage_class": "fast"}  # as KFP sends them
    request = Request.create(**INPUTS, **given)
    assert (request.keep_claims, request.wait_seconds, request.storage_class) == (1, 60, "fast")
    assert request.name == "ds-digits-555555555555"


def test_none_changes_nothing(tmp_path: Path) -> None:
    assert tuple(step(tmp_path, publish="none")) == ("data", "/data/versions/5")
    assert "nothing was published" in (tmp_path / "report.md").read_text()


def test_on_each_node_there_is_an_address_of_what_to_bring(tmp_path: Path) -> None:
    sync = {"exclude": ["*.md"], "dry_run": True, "max_delete": 0.1}
    claim, path = step(tmp_path, publish="each-node", source="gs://bucket/ds", sync=sync)
    assert claim == "data"
    found = EachNode.parse(path)
    assert (found.source, found.dataset, found.digest) == ("gs://bucket/ds", "digits", "5" * 64)
    assert found.options == {"exclude": ["*.md"], "max_delete": 1.0}
    assert "brings version 555555555555 of gs://bucket/ds" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ({"publish": "each-node"}, "publish=each-node needs the source"),
        ({"dataset": ""}, "dataset='' cannot be used: it should be at most 40 lower-case letters"),
        ({"dataset": "A_b"}, "dataset='A_b' cannot be used: it should be at most 40 lower-case"),
        ({"digest": "5" * 63}, "cannot be used: it should be the digest that data_sync returned"),
        ({"publish": "nonsense"}, "publish='nonsense' is unknown: it is one of auto, in-place"),
        ({"publish": "populator"}, "source is ''; the populator needs gs://bucket/prefix"),
        ({"options": {"keep_claims": -1}}, "keep_claims=-1 cannot be used: it should be greater"),
        ({"options": {"keep_claim": 1}}, "options has no setting 'keep_claim'; did you mean"),
        ({"options": {"publish": "none"}}, "options has no setting 'publish'"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, inputs: dict[str, Any], why: str) -> None:
    with pytest.raises(SystemExit) as caught:
        step(tmp_path, **inputs)
    assert why in str(caught.value)
