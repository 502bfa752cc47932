from typing import Any

import pytest

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.data_sync.component import data_sync
from kfp_ddp.components.data_sync.options import Options
from kfp_ddp.components.data_sync.settings import DEFAULTS, options_of


def test_the_step_offers_every_option_with_its_default() -> None:
    inputs = data_sync.component_spec.inputs
    offered = {name: inputs[name].default for name in inputs.keys() & DEFAULTS.keys()}
    assert offered == DEFAULTS | {"include": "", "exclude": ""}
    assert inputs.keys() - DEFAULTS.keys() == {"source", "data_dir", "dataset", "options"}


def test_a_mapping_goes_before_the_inputs_of_its_names() -> None:
    found = options_of("photos", {"max_delete": 0.5, "pack": "tar"}, {"max_delete": 1.0})
    assert found == Options(dataset="photos", max_delete=1.0, pack="tar")


def test_numbers_arrive_as_floats_and_globs_as_one_text() -> None:
    given = {"lock_wait": 60.0, "concurrency": 8, "max_delete": 1, "include": "*.png, *.jpg"}
    found = options_of("", {}, given)
    wanted = Options(lock_wait=60, concurrency=8, max_delete=1.0, include=("*.png", "*.jpg"))
    assert found == wanted
    assert [type(found.lock_wait), type(found.max_delete)] == [int, float]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"max_delet": 1}, "the sync has no setting 'max_delet'; it has bandwidth_mb, concurrency"),
        ({"source": "gs://x"}, "the sync has no setting 'source'"),
        ({"data_dir": "/x"}, "the sync has no setting 'data_dir'"),
        ({"dataset": "x"}, "the sync has no setting 'dataset'"),
        ({"mirror": True}, "the sync has no setting 'mirror'"),
        ({"keep_versions": 1.5}, "keep_versions of the sync is 1.5; give a whole number"),
        ({"keep_versions": True}, "keep_versions of the sync is True; give a whole number"),
        ({"max_delete": "1"}, "max_delete of the sync is '1'; give a number"),
        ({"delete": 0.0}, "delete of the sync is 0.0; give true or false"),
        ({"verify": None}, "verify of the sync is None; give a text"),
        ({"exclude": ["*.txt"]}, r"exclude of the sync is \['\*.txt'\]; give a text of globs"),
        ({"bandwidth_mb": -1.0}, "bandwidth_mb is -1; give 0 or more"),
        ({"max_delete": float("nan")}, "max_delete is nan; give 0 to 1"),
    ],
)
def test_what_the_sync_cannot_use_is_named(given: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        options_of("", {}, given)
