"""The kinds of stores: one row each, and the functions that open what a URI names.

A new kind is a module with a `Store`, a `Source` or both, and a row of `KINDS`.
"""

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from kfp_ddp.core.errors import InputError
from kfp_ddp.storage.http.origin import display
from kfp_ddp.storage.source import Source, SourceOptions, is_text
from kfp_ddp.storage.store import Store


class StoreKind(NamedTuple):
    """A kind of store: module and callable that open a `Store`, if any, and a `Source`."""

    scheme: str
    store: str
    source: str
    aliases: tuple[str, ...] = ()
    """Schemes of other programs for the same."""
    bucket: str = ""
    """Pattern of the names of buckets; '' if there are none."""
    characters: str = ""
    """The characters of these names besides small letters, as text."""
    form: str = ""
    """Pattern of what follows the scheme, where there is one, and what it is, as text."""
    example: str = ""


# What both Google and S3 require of a name; S3 alone also forbids '_'.
_BUCKET = (r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", "digits, '-', '_' and '.'")
_CONTAINER = (r"\$root|\$web|(?=.{3,63}$)[a-z0-9]+(-[a-z0-9]+)*", "digits and single '-'")
_HUB_DATASET = r"datasets/[\w.-]+/[\w.-]+(@[^/]+)?(/.*)?"
_HUB_EXAMPLE = "a dataset of the Hugging Face Hub: write hf://datasets/owner/name"
SYNTHETIC = r"([1-9]\d{0,4})x([1-9]\d{0,8})@([1-9]\d{0,3})(?:\?seed=(\d{1,9}))?"
"""Classes, images, pixels and seed of computed images."""
_COMPUTED = "computed images: write synthetic://CLASSESxIMAGES@PIXELS, ?seed=N after it for others"
KINDS = (
    StoreKind("gs", "gcs.GcsStore", "gcs.GcsSource", ("gcs",), *_BUCKET),
    StoreKind("s3", "s3.S3Store", "s3.S3Source", ("s3a", "s3n"), *_BUCKET),
    StoreKind("az", "azure.AzureStore", "azure.AzureSource", ("azure",), *_CONTAINER),
    StoreKind("hf", "", "huggingface.HuggingFaceSource", form=_HUB_DATASET, example=_HUB_EXAMPLE),
    StoreKind("https", "", "web.WebSource"),
    StoreKind("http", "", "web.WebSource"),
    StoreKind("synthetic", "", "synthetic.SyntheticSource", form=SYNTHETIC, example=_COMPUTED),
    StoreKind("file", "folder.open_folder", "folder_source.FolderSource"),
)
"""All kinds; a path without a scheme is of the last one."""
SCHEMES = "|".join(kind.scheme for kind in KINDS)
"""Pattern of all schemes."""
_NO_LOGIN = r"(?!file:|synthetic:/*\d+x\d+@)"
_LOGIN = re.compile(rf"{_NO_LOGIN}(({SCHEMES})(:/*|;//|//)|[\w+.-]+:/+)[^/]*@", re.IGNORECASE)
_BY_SCHEME = {kind.scheme: kind for kind in KINDS} | {"": KINDS[-1]}
AZURE = re.compile(
    r"(?:abfss?|wasbs?)://([^@/]+)@([^./]+)[^/]*(.*)|https://([^./]+)\.blob\.[^/]*/([^/]+)(.*)"
)
"""Addresses of Azure itself: container, account and path, or account, container and path."""


def kind_of(uri: str) -> StoreKind | None:
    """Return the kind of a URI or path, None for an unknown scheme."""
    return _BY_SCHEME.get(uri.partition("://")[0] if "://" in uri else "")


def open_store(uri: str) -> Store:
    """Return the store at a URI or a path; raise InputError if it is none."""
    check_no_login("the address", uri)
    kind = kind_of(uri)
    if kind is None or not kind.store:
        schemes = ", ".join(f"{kind.scheme}://" for kind in KINDS if kind.store)
        raise InputError(f"cannot store files at {display(uri)}: give {schemes} or a path")
    store: Store = _load(kind.store, uri)(uri)
    return store


def open_source(url: str, options: SourceOptions | None = None) -> Source:
    """Return the source at a URL or a path, of one of the `KINDS`; raise InputError."""
    check_no_login("source", url)
    kind = kind_of(url)
    if "\0" in url or not is_text(url):
        raise InputError(f"source {display(url)!r} is not text; give it in UTF-8")
    if kind is None:
        schemes = ", ".join(f"{kind.scheme}://" for kind in KINDS if kind.scheme != "http")
        raise InputError(
            f"source {display(url)!r} has the unknown scheme {url.partition('://')[0]}://; "
            f"use {schemes}"
        )
    source: Source = _load(kind.source, url)(url, options or SourceOptions())
    return source


def check_no_login(name: str, value: str) -> None:
    """Raise InputError for a URI, or a mistyped one, with a user or password; shows neither."""
    if not _LOGIN.match(value):
        return
    # Azure's own form is container@account, which is no login.
    if ":" in value.partition("://")[2] or not AZURE.fullmatch(value):
        raise InputError(
            f"{name} {display(value)!r} has a user or a password in its address, which is stored "
            "with the run; give them in a netrc file (machine HOST login USER password PASSWORD) "
            "that the environment variable NETRC names"
        )


def _load(name: str, uri: str) -> Callable[..., Any]:
    """Import a module of this package only when one of its kind is opened: libraries are slow."""
    module, _, attribute = name.partition(".")
    try:
        opener: Callable[..., Any] = getattr(import_module(f"{__package__}.{module}"), attribute)
    except ModuleNotFoundError as error:
        raise InputError(
            f"{display(uri)} needs {error.name}, which is not installed: "
            f"pip install 'kfp-ddp[{module}]'"
        ) from None
    return opener
