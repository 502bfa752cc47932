"""What is measured of a model, beside what always is."""

from pydantic import Field

from kfp_ddp.core.settings import Settings


class Measuring(Settings):
    """Further figures of an evaluation."""

    tags: str = ""
    """CSV of tags, whose values the accuracy is told by: a file of the dataset, a path, or gs://,
    s3:// or az://; a column path and one for each tag."""
    resamples: int = Field(1000, ge=0, le=100_000)
    """Bootstrap samples that the intervals of macro F1 and calibration error are made of; 0 for no
    such intervals."""
