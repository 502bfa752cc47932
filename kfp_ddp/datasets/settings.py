"""The options of a sync as a model, which checks what a pipeline's mapping gives."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

from pydantic import AfterValidator, Field, ValidationInfo, create_model, field_validator

from kfp_ddp.core.settings import Settings, split
from kfp_ddp.datasets.options import SyncOptions, expanded
from kfp_ddp.pictures.reading import LayoutRule
from kfp_ddp.training.spec.config import TrainConfig


class _Model(Settings):
    set_by_step: ClassVar[frozenset[str]] = frozenset({"dataset"})

    @field_validator("*", mode="before")
    @classmethod
    def _as_json_means_it(cls, value: object, info: ValidationInfo) -> object:
        """Refuse true for a number, 0 or text for true/false; split a text into globs at commas.

        A number may be text, as YAML reads 1e-3.
        """
        kind = cls.model_fields[str(info.field_name)].annotation
        if kind is bool and not isinstance(value, bool):
            raise ValueError("it should be true or false")
        if kind in (int, float) and isinstance(value, bool):
            raise ValueError("it should be a number")
        if kind == tuple[str, ...] and isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value


_FIELDS: Any = {
    field.name: (field.type, Field(field.default, **field.metadata))
    for field in fields(SyncOptions)
}
# Read where the setting is given: a pod has not the table.
_FIELDS["exclude"][1].metadata.append(AfterValidator(expanded))
SyncSettings = create_model("SyncSettings", __base__=_Model, **_FIELDS)


def options_of(dataset: str, settings: Mapping[str, Any]) -> SyncOptions:
    """Return the options that a pipeline's mapping gives; raise InputError."""
    (values,) = split("sync", settings, SyncSettings)
    return SyncOptions(**dict(SyncSettings.create(dataset=dataset, **values)))


def rule_of(settings: Mapping[str, Any]) -> LayoutRule | None:
    """Return the layout rule of the images from settings of the training; None without."""
    if not settings:
        return None
    others = set(TrainConfig.model_fields) - set(LayoutRule._fields)
    own = dict.fromkeys(others, "is a setting of the training and not of the layout")
    (values,) = split("layout", settings, TrainConfig, reserved=own)
    config = TrainConfig.create(data=".", output_dir=".", **values)
    return config.layout_rule
