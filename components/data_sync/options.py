"""What a person can choose about a sync."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from kfp_ddp.base.settings import Settings, split

Policy = Literal["error", "skip", "encode"]
Links = Literal["error", "skip", "follow"]
Verify = Literal["list", "quick", "full"]
Pack = Literal["none", "tar"]


def _globs(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


Globs = Annotated[tuple[str, ...], BeforeValidator(_globs)]
"""Patterns, also as one comma-separated text."""


class Options(Settings):
    """Options of a sync; the component and the command line are made from it."""

    own: ClassVar[frozenset[str]] = frozenset({"dataset", "mirror"})

    dataset: str = Field(
        "",
        description="Name of the dataset, at most 40 lower-case letters, digits and dashes; empty "
        "for the last part of the source with a hash of it.",
    )
    mirror: bool = Field(
        False,
        description="Write the files themselves to the target, as people expect of a command "
        "line, and no versions.",
    )
    include: Globs = Field(
        (),
        description="Globs of the names to take, all without a value. * stops at a slash, ** does "
        "not; a pattern without a slash is matched with the last segment.",
    )
    exclude: Globs = Field((), description="Globs of the names to leave out.")
    hostile_names: Policy = Field(
        "error", description="What to do with names that cannot be files."
    )
    symlinks: Links = Field(
        "error", description="What to do with symbolic links in a source folder."
    )
    verify: Verify = Field(
        "list",
        description="How to check what is there already: list trusts it, quick compares sizes and "
        "times, full reads every byte, also of what a new version takes over. What is damaged is "
        "brought anew.",
    )
    pack: Pack = Field(
        "none",
        description="tar packs a version into archives of about 256 MB, members sorted by name, "
        "for readers that stream. The training step reads image folders, not archives.",
    )
    delete: bool = Field(True, description="Whether what the source lost is lost in the target.")
    max_delete: float = Field(
        0.5, ge=0, le=1, description="Refuse to lose more than this share of the files."
    )
    dry_run: bool = Field(
        False, description="Only report what a run would do, or be refused for; write nothing."
    )
    concurrency: int = Field(64, ge=1, le=1024, description="Connections at once.")
    bandwidth_mb: float = Field(
        0.0, ge=0, description="The most megabytes a second; 0 for no limit."
    )
    keep_versions: int = Field(
        3, ge=0, description="Versions of this dataset to keep, the new one included; 0 for all."
    )
    keep_hours: float = Field(
        168.0,
        ge=0,
        description="Keep versions too that a sync gave to a run in the last so many hours, as "
        "the run may still read them: more than the longest run takes.",
    )
    lock_wait: int = Field(
        86400,
        ge=0,
        description="Seconds to wait for another sync of the same folder, which may be the first "
        "of a large dataset. A version that is there already waits for nobody.",
    )
    timeout: float = Field(30.0, ge=0.01, description="Longest silence of a peer in seconds.")

    @field_validator("*", mode="before")
    @classmethod
    def _as_json_means_it(cls, value: object, info: ValidationInfo) -> object:
        """In a pipeline's dict true is no number, and 0 or a text is neither."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if kind is bool and not isinstance(value, bool):
            raise ValueError("it should be true or false")
        if kind in (int, float) and isinstance(value, bool | str):
            raise ValueError("it should be a number")
        return value

    @model_validator(mode="after")
    def _versions_are_packed(self) -> Self:
        if self.mirror and self.pack != "none":
            raise ValueError("pack=tar makes versions; leave mirroring off to use it")
        return self


def options_of(dataset: str, given: Mapping[str, Any]) -> Options:
    """The options that a pipeline's mapping gives, checked.

    Raises:
        InputError: one line that names the first setting that is unknown or cannot be used.
    """
    (mine,) = split("sync", given, Options, own={})
    return Options.create(dataset=dataset, **mine)
