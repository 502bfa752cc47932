"""Records of earlier steps as typed models, which a step of another version may have written."""

from pydantic import BaseModel, ConfigDict, ValidationError


class Stored(BaseModel):
    """What a file holds, as it was written; fields of a later version are left out, NaN refused."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


def first_fault(error: ValidationError) -> str:
    """The first field that is missing or wrong, and why."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the document'}: {first['msg']}"
