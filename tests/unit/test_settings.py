"""A mapping shared by several models: who takes what, and what is refused."""

from typing import ClassVar, Literal

import pytest
from pydantic import Field

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import Settings, split
from kfp_ddp.jobs.launch_spec import LaunchSpec


class Engine(Settings):
    own: ClassVar[frozenset[str]] = frozenset({"place"})

    place: str = Field("", description="Set by the step.")
    speed: int = Field(1, ge=1, description="How fast it goes.")
    fuel: Literal["", "oil", "gas"] = Field("oil", description="What it burns.")


class Wheels(Settings):
    place: str = Field("below", description="Where they are.")
    count: int = Field(4, description="How many there are.")


def test_each_model_gets_what_it_has_a_field_for() -> None:
    given = {"speed": 3.0, "count": 6, "place": "above"}
    assert split("car", given, Engine, Wheels, own={}) == [
        {"speed": 3.0},
        {"count": 6, "place": "above"},
    ]


@pytest.mark.parametrize(
    ("given", "models", "says"),
    [
        ({"sped": 3}, (Engine, Wheels), "car has no setting 'sped'; did you mean 'speed'?"),
        ({"place": "x"}, (Engine,), "car sets place, which the step sets itself"),
        ({"count": 3}, (Engine, Wheels), "car sets count, which has a box of its own"),
    ],
)
def test_what_cannot_be_given_is_one_line(
    given: dict[str, object], models: tuple[type[Settings], ...], says: str
) -> None:
    with pytest.raises(InputError) as raised:
        split("car", given, *models, own={"count": "has a box of its own"})
    assert str(raised.value) == says


def test_only_what_was_set_is_handed_on_and_comes_back_the_same() -> None:
    engine = Engine.create(speed=3.0)
    assert engine.given() == {"speed": 3}
    assert Engine.create(**engine.given()) == engine


def test_a_value_out_of_range_tells_what_the_setting_means() -> None:
    with pytest.raises(InputError) as raised:
        Engine.create(speed=0)
    assert str(raised.value) == (
        "speed=0 cannot be used: it should be greater than or equal to 1 (How fast it goes)"
    )
    assert Engine.choices("fuel") == ("", "oil", "gas")
    assert Engine.choices("speed") == ()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"command": "python3 train.py"}, "it should be a list such as ['python3', 'train.py'] ("),
        ({"command": 1}, "command=1 cannot be used: it should be a list (Command of each worker"),
        ({"nodes": "two"}, "nodes='two' cannot be used: it should be a valid integer (Number of"),
        ({"gpus": 2}, "there is no setting 'gpus'; did you mean 'gpus_per_node'?"),
        ({"gpu": 2}, "there is no setting 'gpu'; did you mean 'gpus_per_node'?"),
        ({"xyz": 2}, "there is no setting 'xyz'"),
        ({"": 2}, "there is no setting ''"),
        (
            {"pip_index_urls": "https://me:5150@e.com"},
            "pip_index_urls cannot be used: it should be",
        ),
    ],
)
def test_what_a_person_types_first_is_told_how_to_write(
    given: dict[str, object], says: str
) -> None:
    with pytest.raises(InputError) as raised:
        LaunchSpec.create(**{"image": "i", "command": ["c"], **given})
    assert says in str(raised.value)
    assert "5150" not in str(raised.value)


@pytest.mark.parametrize("given", [{"env": {"TOKEN": 5150}}, {"env_vars": [5150]}])
def test_a_value_that_may_be_secret_is_not_told(given: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"^env.* cannot be used: ") as raised:
        LaunchSpec.create(image="i", command=["c"], **given)
    assert "5150" not in str(raised.value)
