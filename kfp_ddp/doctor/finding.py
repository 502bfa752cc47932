"""One line of the doctor."""

from dataclasses import dataclass
from typing import Literal

ASK_ADMIN = "ask an administrator of the cluster, or run it as one"
"""The remedy where what is looked at may not be read."""


@dataclass(frozen=True)
class Finding:
    """What a check found: its state, what was looked at, what was found and a remedy."""

    state: Literal["ok", "bad", "warn"]
    what: str
    said: str
    remedy: str = ""
