"""The name of a dataset: what its versions and claims are kept under."""

import hashlib
import os
import re
from urllib.parse import unquote

from kfp_ddp.core.errors import InputError

NAME = "^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"
NAME_IN_WORDS = (
    "at most 40 lower-case letters, digits and dashes, as it becomes part of a claim's name"
)


def dataset_name(dataset: str, source: str) -> str:
    """The name that was given, or else one that no other source has.

    That is the last part of the source's address, and six digits of a hash of all of it.

    Raises:
        InputError: it could not be part of a claim's name and a label, or there is no source.
    """
    if not dataset and source:
        address = canonical(source)
        parts = re.sub(r"/[^/]+\.jsonl$", "", address.lower()).split("/")
        word = re.sub("[^a-z0-9]+", "-", parts[-1]).strip("-")[:33].strip("-")
        return f"{word or 'data'}-{hashlib.sha256(address.encode()).hexdigest()[:6]}"
    if not re.fullmatch(NAME, dataset):
        raise InputError(f"dataset is {dataset!r}; give {NAME_IN_WORDS}")
    return dataset


def canonical(source: str) -> str:
    """The one spelling of a source: whole paths, no slash at the end, no query or login."""
    if not source:
        return ""
    scheme, mark, rest = source.partition("://")
    if scheme in ("http", "https"):
        server, slash, path = rest.partition("?")[0].partition("#")[0].partition("/")
        return f"{scheme}://{server.rpartition('@')[2]}{slash}{path}".rstrip("/")
    if mark and scheme != "file":
        return source.rstrip("/")
    return os.path.abspath(unquote(rest.removeprefix("localhost")) if mark else source)
