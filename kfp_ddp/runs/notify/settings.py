"""Who is told of a run's end."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from kfp_ddp.core.settings import Settings
from kfp_ddp.core.step import KEY_NAME, KEY_NAME_MEANING, needed_secret

_ADDRESSES = r"^$|^[^@\s,<>]+@[^@\s,<>]+(,[^@\s,<>]+@[^@\s,<>]+)*$"
CHANNELS = ("notify_webhook", "notify_slack", "notify_smtp")


class Notification(Settings):
    """Who is told of the end of a run, and of which."""

    patterns: ClassVar = {
        KEY_NAME: KEY_NAME_MEANING,
        _ADDRESSES: "addresses such as ana@example.com,ben@example.com",
        r"^$|^https?://\S+$": "an address such as https://kubeflow.example.com/pipeline",
    }
    secret: ClassVar = frozenset(CHANNELS)

    notify_webhook: str = Field("", pattern=KEY_NAME)
    """Key of the bucket's secret that holds an address, which gets the end of a run as JSON."""
    notify_slack: str = Field("", pattern=KEY_NAME)
    """Key of that secret that holds the address of an incoming webhook of Slack, or of what takes
    its form, as Mattermost."""
    notify_smtp: str = Field("", pattern=KEY_NAME)
    """Key of that secret that holds a mail server, as smtp://user:password@host:587, or smtps://
    for TLS from the start; a password is sent over TLS alone."""
    notify_email: str = Field("", pattern=_ADDRESSES)
    """Who gets an e-mail over notify_smtp, with commas between."""
    notify_from: str = Field("", pattern=_ADDRESSES)
    """Sender of the e-mails; empty for the first who gets them."""
    notify_on: Literal["always", "change", "failure"] = "always"
    """Which ends are told: all; all but those where nothing was trained (change); failures."""
    kfp_ui: str = Field("", pattern=r"^$|^https?://\S+$")
    """Address of the KFP UI, for a link to the run."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if bool(self.notify_smtp) != bool(self.notify_email):
            given = "notify_smtp" if self.notify_smtp else "notify_email"
            raise ValueError(f"{given} is set: an e-mail needs both notify_smtp and notify_email")
        return self

    @classmethod
    def among(cls, job: Mapping[str, Any]) -> Self:
        """Those of the settings of a job; raises InputError as `create` does."""
        return cls.create(**{name: job[name] for name in cls.model_fields if name in job})

    @property
    def keys(self) -> dict[str, str]:
        """The keys of the secret by the settings that name them."""
        return {name: key for name in CHANNELS if (key := getattr(self, name))}

    def link(self, run_id: str) -> str:
        """Where the UI shows the run; '' where the UI is not known."""
        return f"{self.kfp_ui.rstrip('/')}/#/runs/details/{run_id}" if self.kfp_ui else ""


def check_keys(notification: Notification) -> None:
    """Refuse keys that the secret lacks.

    Raises:
        InputError: naming the first.
    """
    for name, key in notification.keys.items():
        needed_secret(key, name)
