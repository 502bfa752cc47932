"""Typing errors in addresses, each refused with the address to write instead."""

import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from kfp_ddp.core.errors import InputError
from kfp_ddp.storage.http.origin import display
from kfp_ddp.storage.kinds import AZURE, KINDS, SCHEMES, StoreKind, check_no_login, kind_of

_CONSOLE = (
    (r"https://(?:console|storage)\.cloud\.google\.com/(?:storage/browser/)?(?:_details/)?", "gs"),
    (r"https://(?:[\w-]+\.)?console\.aws\.amazon\.com/s3/(?:buckets|object)/", "s3"),
)
"""Beginnings of the pages of consoles that show a bucket, with the scheme of the bucket."""


def check_address(name: str, value: str) -> None:
    """Raise InputError for a mistyped address; whether it exists is checked when it is opened.

    Such as a scheme without its slashes, the page of a console, an invalid name of a bucket, or a
    relative path that does not exist. `name` is the parameter; only a source may be read-only.
    """
    check_no_login(name, value)
    if "://" not in value:
        _check_path(name, value)
        return
    _refuse_alias(name, value)
    _refuse_azure(name, value)
    _refuse_console(name, value)
    kind = _usable_kind(name, value)
    _check_form(name, value, kind)


def _refuse_alias(name: str, value: str) -> None:
    scheme, _, rest = value.partition("://")
    for kind in KINDS:
        if scheme in kind.aliases:
            raise InputError(f"{name}={value!r} is written {kind.scheme}://{rest} here")


def _refuse_azure(name: str, value: str) -> None:
    azure = AZURE.fullmatch(value)
    # A manifest in a public container is read by https, as from any other server.
    if azure is None or value.endswith(".jsonl"):
        return
    container = azure[1] or azure[5]
    account = azure[2] or azure[4]
    path = azure[3] or azure[6] or ""
    raise InputError(
        f"{name}={value!r} is written az://{container}{path} here, with "
        f"AZURE_STORAGE_ACCOUNT={account} in the secret of the bucket"
    )


def _refuse_console(name: str, value: str) -> None:
    for page, scheme in _CONSOLE:
        if start := re.match(page, value):
            address = urlsplit(value[start.end() :])
            prefix = "".join(parse_qs(address.query).get("prefix", []))
            bucket = address.path.partition(";")[0].strip("/")
            path = "/".join(filter(None, (bucket, prefix)))
            raise InputError(f"{name}={value!r} is a page of a console: write {scheme}://{path}")


def _usable_kind(name: str, value: str) -> StoreKind:
    """Return the kind of an address; raise InputError if `name` cannot be of it."""
    usable = list(KINDS)
    if name != "source":  # only a source may be read-only
        usable = [kind for kind in KINDS if kind.store]
    kind = kind_of(value)
    if kind is None or kind not in usable:
        scheme = value.partition("://")[0]
        schemes = ", ".join(f"{kind.scheme}://" for kind in usable)
        raise InputError(
            f"{name}={display(value)!r} cannot be used: it begins with {scheme}://, and not with "
            f"{schemes}"
        )
    return kind


def _check_form(name: str, value: str, kind: StoreKind) -> None:
    """Raise InputError for an invalid name of a bucket, or of a dataset."""
    rest = value.partition("://")[2]
    bucket = rest.partition("/")[0]
    is_named = kind.bucket and bucket
    if is_named and not re.fullmatch(kind.bucket, bucket):
        raise InputError(
            f"{name}={value!r}: {bucket!r} is not a valid name of a bucket: use three or more of "
            f"small letters, {kind.characters}, with a letter or digit at both ends"
        )
    if kind.form and not re.fullmatch(kind.form, rest):
        raise InputError(f"{name}={value!r} is not {kind.example}")


def _check_path(name: str, value: str) -> None:
    """Refuse a URI with a typing error in its scheme, and a relative path that does not exist."""
    if typo := re.match(rf"({SCHEMES})(:/?|;//|//)(?=[^/])", value, re.IGNORECASE):
        scheme = typo[1].lower()
        start = "file:///" if scheme == "file" else f"{scheme}://"
        raise InputError(f"{name}={value!r} is not an address: write {start}{value[typo.end() :]}")
    path = Path(value)
    if path.is_absolute() or path.exists():
        return
    is_relative = value.startswith("./") or path.parts[0] == ".."
    # A folder of results may not exist yet, below one that does.
    is_below_folder = len(path.parts) > 1 and Path(path.parts[0]).is_dir()
    if is_relative or is_below_folder:
        return
    raise InputError(
        f"{name}={value!r} is a folder that does not exist: for a bucket write gs://{value}, "
        f"for a path of this machine ./{value}"
    )
