"""Whether a place is written as one: a bucket whose scheme was forgotten is taken for a folder."""

import re
from pathlib import Path

from kfp_ddp.base.errors import InputError

SCHEMES = "gs|s3|https?|file"
# What both Google and S3 ask of a name, S3 alone without '_'.
BUCKET = r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"


def check_place(name: str, value: str) -> None:
    """Refuse a place that is mistyped; what does not exist is told by who reads it.

    Args:
        name: The parameter, such as source.
        value: A URI or a path.

    Raises:
        InputError: a scheme without its slashes, a bucket that can have no such name, or a
            relative path that is not there.
    """
    scheme, slashes, rest = value.partition("://")
    if not slashes:
        if mistyped := re.match(rf"({SCHEMES})(:/?|;//|//)(?=[^/])", value, re.IGNORECASE):
            meant = f"{mistyped[1].lower()}://{'/' * (mistyped[1] == 'file')}"
            raise InputError(
                f"{name}={value!r} is no address: write {meant}{value[mistyped.end() :]}"
            )
        path = Path(value)
        # A folder of results may be made yet, below one that is there.
        if value and not path.is_absolute() and not (path.exists() or path.parts[0] == ".."):
            if value.startswith("./") or (len(path.parts) > 1 and Path(path.parts[0]).is_dir()):
                return
            raise InputError(
                f"{name}={value!r} is a folder that is not there: for a bucket write gs://{value}, "
                "for a folder its whole path"
            )
    elif scheme in ("gs", "s3"):
        bucket = rest.partition("/")[0]
        if bucket and not re.fullmatch(BUCKET, bucket):
            raise InputError(
                f"{name}={value!r}: no bucket can be called {bucket!r}; its name is of small "
                "letters, digits, '-', '_' and '.', with a letter or digit at both ends"
            )
