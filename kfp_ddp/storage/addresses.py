"""Whether a place is written as one: a bucket whose scheme was forgotten is taken for a folder."""

import re
from pathlib import Path

from kfp_ddp.core.errors import InputError

SCHEMES = "gs|s3|az|hf|https?|file"
# What both Google and S3 ask of a name, S3 alone without '_'.
BUCKET = r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"
CONTAINER = r"\$root|\$web|(?=.{3,63}$)[a-z0-9]+(-[a-z0-9]+)*"
DATASET = r"datasets/[\w.-]+/[\w.-]+(@[^/]+)?(/.*)?"
ALIASES = {"gcs": "gs", "s3a": "s3", "s3n": "s3", "azure": "az"}
"""What other programs call our schemes."""
AZURE = r"(?:abfss?|wasbs?)://([^@/]+)@([^./]+)[^/]*(.*)|https://([^./]+)\.blob\.[^/]*/([^/]+)(.*)"


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
    if scheme in ALIASES and slashes:
        raise InputError(f"{name}={value!r} is written {ALIASES[scheme]}://{rest} here")
    if not value.endswith(".jsonl") and (azure := re.fullmatch(AZURE, value)):
        container, account = azure[1] or azure[5], azure[2] or azure[4]
        raise InputError(
            f"{name}={value!r} is written az://{container}{azure[3] or azure[6] or ''} here, with "
            f"AZURE_STORAGE_ACCOUNT={account} in the secret of the bucket"
        )
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
        _check_bucket(name, value, BUCKET, "digits, '-', '_' and '.'")
    elif scheme == "az":
        _check_bucket(name, value, CONTAINER, "digits and single '-'")
    elif scheme == "hf" and not re.fullmatch(DATASET, rest):
        raise InputError(
            f"{name}={value!r} is no dataset of the Hugging Face Hub: write hf://datasets/owner/name"
        )


def _check_bucket(name: str, value: str, pattern: str, of: str) -> None:
    bucket = value.partition("://")[2].partition("/")[0]
    if bucket and not re.fullmatch(pattern, bucket):
        raise InputError(
            f"{name}={value!r}: no bucket can be called {bucket!r}; its name has three or more of "
            f"small letters, {of}, with a letter or digit at both ends"
        )
