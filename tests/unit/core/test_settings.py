"""Settings models, mappings that several models share, and records."""

import re
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import Field, ValidationError

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import (
    Settings,
    Stored,
    first_fault,
    mapping_in,
    mapping_of,
    nearest,
    split,
)
from kfp_ddp.jobs.launch_spec import LaunchSpec


class Engine(Settings):
    set_by_step: ClassVar[frozenset[str]] = frozenset({"place"})

    place: str = Field("", description="Set by the step.")
    speed: int = Field(1, ge=1, description="How fast it goes.")
    fuel: Literal["", "oil", "gas"] = Field("oil", description="What it burns.")


class Wheels(Settings):
    place: str = Field("below", description="Where they are.")
    count: int = Field(4, description="How many there are.")


def test_each_model_gets_its_fields() -> None:
    fields = {"speed": 3.0, "count": 6, "place": "above"}
    assert split("car", fields, Engine, Wheels) == [{"speed": 3.0}, {"count": 6, "place": "above"}]


@pytest.mark.parametrize(
    ("fields", "models", "message"),
    [
        ({"sped": 3}, (Engine, Wheels), "car has no setting 'sped'; did you mean 'speed'?"),
        ({"place": "x"}, (Engine,), "car sets place, which the step sets itself"),
        ({"count": 3}, (Engine, Wheels), "car sets count, which has a box of its own"),
    ],
)
def test_unknown_setting_fails_with_one_line_error(
    fields: dict[str, object], models: tuple[type[Settings], ...], message: str
) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        split("car", fields, *models, reserved={"count": "has a box of its own"})


def test_given_has_the_fields_that_are_set() -> None:
    engine = Engine.create(speed=3.0)
    assert engine.explicit() == {"speed": 3}
    assert Engine.create(**engine.explicit()) == engine


def test_error_has_the_description_of_the_setting() -> None:
    line = "speed=0 cannot be used: it should be greater than or equal to 1 (How fast it goes)"
    with pytest.raises(InputError, match=f"^{re.escape(line)}$"):
        Engine.create(speed=0)
    assert Engine.choices("fuel") == ("", "oil", "gas")
    assert Engine.choices("speed") == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"command": "python3 train.py"}, "it should be a list such as ['python3', 'train.py'] ("),
        ({"nodes": "two"}, "nodes='two' cannot be used: it should be a valid integer (Number of"),
        ({"gpus": 2}, "there is no setting 'gpus'; did you mean 'gpus_per_node'?"),
        ({"pip_index_urls": "https://me:5150@e.com"}, "pip_index_urls cannot be used: it"),
    ],
)
def test_error_says_how_to_write_the_value(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as raised:
        LaunchSpec.create(**{"image": "i", "command": ["c"], **fields})
    assert "5150" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("lr", "learning_rate"), ("gpu", "gpus_per_node"), ("node", "nodes"), ("ndoes", "nodes")),
        *(("region", ""), ("pretrained", ""), ("xyz", ""), ("", ""), ("x" * 10**7, "")),
    ],
)
def test_suggestion_is_an_alias_or_close(name: str, meant: str) -> None:
    known = ["cpu", "gpus_per_node", "learning_rate", "node_selector", "nodes", "precision"]
    assert nearest(name, [*known, "retries"]) == meant


@pytest.mark.parametrize("fields", [{"env": {"TOKEN": 5150}}, {"env_vars": [5150]}])
def test_error_does_not_show_a_secret_value(fields: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"^env.* cannot be used: ") as raised:
        LaunchSpec.create(image="i", command=["c"], **fields)
    assert "5150" not in str(raised.value)


class Weights(Stored):
    size: int
    shares: dict[str, float]


@pytest.mark.parametrize(
    "text",
    [None, "", b"", '{"step": 1', b"\xff\xfe", "[1, 2]", "null", "[" * 100_000, '{"a": 1, "a": 2}'],
)
def test_what_is_no_json_object_is_an_empty_one(text: str | bytes | None, tmp_path: Path) -> None:
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
    ("text", "message"),
    [
        ('{"shares": {}}', "size: Field required"),
        ('{"size": 1, "shares": {"a": NaN}}', "shares.a: Input should be a finite number"),
        ("[]", "the document: Input should be an object"),
    ],
)
def test_the_first_fault_of_a_record_is_named(text: str, message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        Weights.model_validate_json(text)
    assert first_fault(raised.value) == message
