"""Settings of the dataset, and of how its images are read."""

from typing import Literal, Self

from pydantic import Field, model_validator

from kfp_ddp.core.settings import SettingsPart
from kfp_ddp.pictures.reading import BACKGROUND, MAX_PIXELS, VALUE_RANGE, Fit

FOLD = r"^$|^[1-9]\d?/([2-9]|[1-9]\d)$"
PATTERNS = {
    FOLD: "a part such as 2/5, or ''",
    BACKGROUND: "#rrggbb or ''",
    VALUE_RANGE: "two numbers BLACK,WHITE or ''",
}


class DataSettings(SettingsPart):
    """The images of a run, its labels and its splits."""

    patterns = PATTERNS

    data: str
    """Folder with the images, as <class>/, or as train/<class>/ and val/<class>/."""
    val_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of the images for validation where the dataset has no val/. An image's name decides, so
    it keeps its split when images are added, except in small classes; 0: the dataset must have a
    val/."""
    fold: str = Field("", pattern=FOLD)
    """Part of the images that validates in place of val_fraction: 2/5 is the second of five, by
    names. Over all folds each image validates once: a sweep over fold gives their mean."""
    labels: str = ""
    """Table of path, label and optionally split in the dataset, as labels.csv; several with commas
    between, and columns after #, as labels.csv#id,breed; '' where folders name the classes."""
    layout: Literal["auto", "classes", "splits"] = "auto"
    """What the dataset's top folders are: classes, or splits, whose folders are the classes (those
    without a split's name are for training if none is named so); auto: as their names and folders
    show, or an error if they can be both."""
    output_dir: str
    """Folder for checkpoints, metrics and logs."""

    @model_validator(mode="after")
    def _check_fold(self) -> Self:
        number, _, folds = self.fold.partition("/")
        if self.fold and int(number) > int(folds):
            raise ValueError(f"fold={self.fold} is not a part: the last one is {folds}/{folds}")
        return self


class ImageSettings(SettingsPart):
    """How images are read, cached and shuffled."""

    patterns = PATTERNS

    images: Literal["convert", "strict"] = "convert"
    """Images that are not RGB or not square: convert them, with a warning if they are not RGB, or
    refuse them (strict)."""
    background: str = Field("#ffffff", pattern=BACKGROUND)
    """Colour behind transparent pixels, as #rrggbb; '' drops the alpha channel, as earlier versions
    did. Evaluation, predict and serve take that of the training."""
    value_range: str = Field("", pattern=VALUE_RANGE)
    """Values of black and white, such as -1000,1000, of images of one channel with more than 8 bits
    or fractions; '': 0 and the largest value of the bits, or 1, and images for which that is not
    clear are unreadable. Evaluation, predict and serve take that of the training."""
    fit: Fit = "crop"
    """What the network sees of an image that is not square: crop, the square in its middle; pad,
    all of it between grey bars; squash, all of it without its proportions. Evaluation, predict and
    serve take that of the training."""
    on_bad_image: Literal["fail", "skip"] = "fail"
    """An image that cannot be read: fail with its name, or skip and count it."""
    max_pixels: int = Field(MAX_PIXELS, ge=1)
    """An image of more pixels is not decoded; it counts as unreadable (on_bad_image)."""
    verify_images: int = Field(10_000, ge=0)
    """Decode up to this many images before the first epoch to find broken ones; 0: none."""
    workers: int = Field(4, ge=0)
    """Loader processes of each rank; 0: the rank loads images itself."""
    cache_gb: float = Field(0.25, ge=0)
    """Cache decoded images on disk if they take at most this many gigabytes; 0: never."""
    cache_dir: str = ""
    """Folder for the decoded images; '' for the temporary folder."""
    shuffle_buffer_mb: float = Field(1024.0, gt=0)
    """Shuffle images of archives (pack=tar) within windows of this many megabytes, over all ranks,
    of chunks in random order; a smaller dataset is shuffled completely."""

    @model_validator(mode="after")
    def _check_value_range(self) -> Self:
        black, _, white = self.value_range.partition(",")
        if black and float(black) == float(white):
            raise ValueError(f"value_range={self.value_range} is one value: give black and white")
        return self
