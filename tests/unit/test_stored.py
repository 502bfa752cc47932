from pathlib import Path

import pytest
from pydantic import ValidationError

from kfp_ddp.core.settings import Stored, first_fault, mapping_in, mapping_of


class Weights(Stored):
    size: int
    shares: dict[str, float]


@pytest.mark.parametrize(
    "text", [None, "", b"", '{"step": 1', b"\xff\xfe", "[1, 2]", "null", "[" * 100_000]
)
def test_what_is_no_whole_json_object_is_taken_for_an_empty_one(
    text: str | bytes | None, tmp_path: Path
) -> None:
    assert mapping_in(text) == {}
    (tmp_path / "file.json").write_bytes(text.encode() if isinstance(text, str) else text or b"")
    assert mapping_of(tmp_path / "file.json") == {}


def test_a_json_object_is_read_from_a_text_and_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text('{"name": "é"}')
    assert mapping_in('{"name": "é"}'.encode()) == mapping_of(tmp_path / "file.json")
    assert mapping_of(tmp_path / "file.json") == {"name": "é"}
    assert mapping_of(tmp_path / "none.json") == {}
    assert mapping_of(tmp_path) == {}


def test_a_record_passes_over_what_a_later_version_adds() -> None:
    assert Weights.model_validate({"size": 1, "shares": {}, "new": 2}).model_dump() == {
        "size": 1,
        "shares": {},
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"shares": {}}', "size: Field required"),
        ('{"size": 1, "shares": {"a": NaN}}', "shares.a: Input should be a finite number"),
        ("[]", "the document: Input should be an object"),
    ],
)
def test_the_first_fault_of_a_record_is_named(text: str, said: str) -> None:
    with pytest.raises(ValidationError) as raised:
        Weights.model_validate_json(text)
    assert first_fault(raised.value) == said
