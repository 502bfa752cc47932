"""What may not be stored or shown: one answer for all texts that a user gives.

An address is allowed in known forms. Of other texts those are refused that have a known form of a
secret, or a name that says so.
"""

import base64
import itertools
import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.packed import PYTHON, WORD

_SCHEME = r"(?<![\w.+-])[a-z][a-z0-9+.-]+:/"
_ADDRESS_START = re.compile(_SCHEME, re.IGNORECASE)
_END = r"""(?=[/?#\s"'`,;)\]}>|\\]|$)"""
_HOST = (
    r"(?:[\w-]+(?:\.[\w-]+)*\.?|\[[0-9a-f:.]+\]|\$\{?\w+\}?|\$\(\w+\)|<[\w -]+>"
    r"|\{\{?[^@]{0,512}?\}\}?)"
)
_NO_AT = r"(?!(?:[^@]|@(?=sha(?:256|512):)){0,512}@(?!sha(?:256|512):))"
_ADDRESS = re.compile(
    "|".join(
        (
            rf"(?:gs|gcs|s3[an]?|az|azure|hf)://(?:\$?[\w.-]*|{_HOST}){_END}",
            r"(?:abfss?|wasbs?)://[\w$-]+@\w+\.(?:dfs|blob)\.[\w.]+(?=/|$)",
            r"synthetic://\d+x\d+@\d+(?:\?seed=\d+)?$",
            r"file://(?:/|[\w.-]*$)",
            r"models:/[\w.-]+@[\w.-]+$",
            rf"[\w+.-]+:/(?!/){_NO_AT}",
            rf"[\w+.-]+://(?:git@)?(?:localhost|[\w-]+(?:\.[\w-]+)+){_END}",
            rf"[\w+.-]+://(?:git@)?{_HOST}(?::(?:\d{{1,5}}|{_HOST}))?{_END}{_NO_AT}",
            r"[\w+.-]+:///",
        )
    ),
    re.IGNORECASE,
)
"""Addresses: scheme://host:port/path without a user. Where an @ may be of a password, it has none.

So is `https://user:12/3@host`; `@` is part of a name in a bucket, below a host with a domain, in
computed images, in Azure's own form and in the digest of an image.
"""
_LOGIN = re.compile(
    r"(?<![\w@])(?!(?:mailto|e?-?mail|contact|owner):|\d\d?:\d\d)"
    r"[^\s/:@\"'=,<>(){}\[\]]{1,128}:(?![/\\])[^\s@]{0,256}@(?!sha(?:256|512):)[\w\[]"
    r"|//[^\s/@]{0,128}:[^\d/\s][^\s@]{0,256}@",
    re.IGNORECASE,
)
"""user:password@host, without a scheme, too."""
_TOKEN = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w-]{30}|\bya29\.[\w-]{16}"
    r"|\bgh[pousr]_[A-Za-z0-9]{16}|\bgithub_pat_\w{16}|\bglpat-[\w-]{16}|\bxox[a-z]-[\w-]{8}"
    r"|\bhf_[A-Za-z0-9]{16}|\bnpm_[A-Za-z0-9]{16}|\bpypi-[\w-]{40}|\bdckr_pat_[\w-]{16}"
    r"|\bsk-(?:proj-|ant-|live-)?[A-Za-z0-9]{20}|\b[sr]k_live_\w{8}"
    r"|(?<![\w-])(?>[\w-]*?\beyJ)[\w-]{8,}\.[\w-]{8}|[Bb]earer\s+(?=\S*\d)[\w.~+/-]{16}"
    r"|hooks\.slack\.com/(?:services|workflows)/\w|discord(?:app)?\.com/api/webhooks/\d"
    r"|://[^\s?#]{0,256}\?[\w.~+/-]{16,}(?![\w.~+/=-])"
)
"""Beginnings of tokens and keys, and webhooks and long queries that are secrets themselves."""
_PAIR = re.compile(
    r"(?:(?P<query>[?&])|(?<![\w.%]))(?P<name>[a-z_][\w.%-]*)"
    r"(?:(?:\s*=\s*|[\"']?:\s+|[\"']\s*:)[\"']?(?P<value>[^\"'&;,#}\s]*))?",
    re.IGNORECASE,
)
"""A name, and its value if it has one: a name alone is read, too, once and not from each '-'."""
_FLAG = re.compile(r"(?<!\S)--?([a-z][\w-]*)\s+(?=[^\s-])", re.IGNORECASE)
_HARMLESS_QUERY = re.compile(
    r"(?:alt|branch|bucket_?type|checksum|columns?|config|date|dl|download|encoding|experiment"
    r"|export|fields|file(?:name)?|format|generation|gid|group|id|lang(?:uage)?|limit|max|md5"
    r"|min|mode|model|name|namespace|ns|offset|order|page(?:_?size)?|part|path|persistent_?id"
    r"|prefix|project|q|query|raw|ref|region|rev(?:ision)?|run|search|seed|sha256|sheet|size"
    r"|sort|split|subdirectory|subset|tab|table|tag|task|tf-hub-format|timestamp|type|v"
    r"|version(?:_?id)?|view|year)=.*"
    r"|[\w.-]+=(?:-?\d{1,9}|true|false|yes|no)",
    re.IGNORECASE,
)
"""Parts of a query that are no secret: by their name, or small numbers and switches."""
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:[a-z]*passw(?:or)?d|pass(?:phrase|code)?|pwd|pw|tokens?|secrets?|credentials?"
    r"|creds|hmac|jwt|authorization|cookie|j?session_?id|sas_(?:token|key)"
    r"|(?:access|amz|goog)_signature"
    r"|(?:api|access|account|secret|private|auth|master|shared|subscription|service|ssh|storage"
    r"|encryption|license|consumer|client|deploy|admin|root|webhook|wandb)_?keys?(?:_id)?)"
    r"(?:_\d+|_value)?$"
    r"|^(?>env_|\w*?_env_)(?:\w+_)?(?:keys?|tokens?|passw(?:or)?d|secrets?|credentials?)(?:_|$)"
)
"""Names in small letters with _, the last two of a path.

An atomic group stops at the first such word: the end of the name is then sought once.
"""
_HARMLESS_START = (
    r"(?:public|primary|foreign|partition|sort|num|max|min|pad|bos|eos|unk|mask|cls|sep"
    r"|special|class|use|has|is|no|n)_"
)
_HARMLESS_NAME = re.compile(
    rf"^(?>{_HARMLESS_START}|\w*?_{_HARMLESS_START})"
    r"(?:\w+_)?(?:keys?|tokens?|secrets?|password)$"
    r"|_(?:file|path|dir|folder|name|type|url|limit|length|size|count|mode|ttl|provider|header)$"
    r"|^(?!env_)(?:\w+_)?(?:bucket_secret|image_pull_secrets|env_from_secrets)$"
    r"|^env_from_secrets$|(?:^|_)release_(?:sign_password|registry_token)$"
)
_HARMLESS_VALUE = re.compile(
    r"[-+]?\d{0,4}(?:\.\d+)?(?:e[-+]?\d+)?|=\d+(?:\.[\w*]+)*"
    r"|true|false|yes|no|on|off|none|null|auto|default"
    r"|\$\w+|\$\{.*|\$\(\w+\)|\{\{.*|<[\w -]+>|\*+|/[\w.-]+(?:/[\w.-]+)+|\[\]|\{",
    re.IGNORECASE,
)
"""Numbers, pins, switches, references and paths: values that tell nothing under any name."""
_WORD = re.compile(rf"^{WORD}((?:[A-Za-z0-9+/]{{4}})*(?:[A-Za-z0-9+/]{{2,3}})?)")
"""A packed word, without its padding."""
_REMEDY = (
    "which KFP would store and show with the run: leave it out, and put it into a Secret, that of "
    "the bucket or one that env_from_secrets names"
)


def check_secrets(value: Any, name: str = "") -> None:
    """Raise InputError for a secret, which KFP stores and shows.

    The value, a text or a list or mapping of values, is not printed; `name` is its parameter.
    """
    for path, text in _texts(value, name):
        if why := reason(text) or reason_of_name(path, text):
            raise InputError(f"{'.'.join(path).strip('.')} {why}, {_REMEDY}")


def reason(text: str) -> str:
    """Return why a text may not be shown, to follow its name; '' if it may."""
    # A secret may be written with %, or in other letters than ASCII.
    for form in dict.fromkeys((text, unquote(text))):
        if why := _reason_of_plain(unicodedata.normalize("NFKC", form)):
            return why
    return ""


def _reason_of_plain(text: str) -> str:
    if _LOGIN.search(text) or not _has_known_addresses(text):
        return "is an address with a login, or of no known form"
    if _TOKEN.search(text):
        return "has a token or a key"
    return _reason_of_pairs(_FLAG.sub(r"--\1=", text))


def _has_known_addresses(text: str) -> bool:
    starts = _ADDRESS_START.finditer(text)
    return all(_ADDRESS.match(text, start.start()) for start in starts)


def _reason_of_pairs(text: str) -> str:
    for pair in _PAIR.finditer(text):
        name = pair["name"]
        value = pair["value"]
        if value is None:
            continue
        if pair["query"] and not _HARMLESS_QUERY.fullmatch(f"{name}={value}"):
            return "is an address with a signature, or with a query that may have a secret"
        if why := reason_of_name((name,), value):
            return why
    return ""


def reason_of_name(path: tuple[str, ...], value: str) -> str:
    """Return why a value may not be shown that has a name, the last of `path`; '' if it may."""
    name = "_".join(filter(None, path[-2:]))
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|\W+", "_", name).lower()
    if not _SECRET_NAME.search(words) or _HARMLESS_NAME.search(words):
        return ""
    return "" if _HARMLESS_VALUE.fullmatch(value) else "has a secret by its name"


def _texts(value: Any, *path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield all texts in a value with the names that lead to them; code is not read."""
    if isinstance(value, Mapping):
        yield from _texts_of_mapping(value, path)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, *path)
        # A command's option and its argument are two texts, and a secret by the option's name.
        for option, argument in itertools.pairwise(value):
            if str(option).startswith("-"):
                yield path, f"{option} {argument}"
    elif isinstance(value, str) and not value.startswith(PYTHON):
        yield path, _WORD.sub(_unpacked, value)


def _texts_of_mapping(
    value: Mapping[Any, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    entries = dict(value)
    if isinstance(value.get("name"), str):  # of Kubernetes' environment variables
        entries = {**entries, value["name"]: value.get("value")}
    for key, item in entries.items():
        yield (*path, "name"), str(key)
        yield from _texts(item, *path, str(key))


def _unpacked(word: re.Match[str]) -> str:
    return base64.b64decode(f"{word[1]}==").decode("latin-1")
