"""Configuration by flag, environment variable, file or default.

Not a pydantic model: its import would take most of the time of `--help`.
"""

import os
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line

T = TypeVar("T")
PREFIX = "KFP_DDP_"
HERE = "kfp-ddp.yaml"
_LARGEST = 1 << 20
"""Bytes of a file of settings."""
GUARDED = {
    "host": (
        *("host", "ca_file", "token_file", "cookie_file"),
        *("username", "password_file", "iap_client_id"),
        *("kfp_namespace", "context", "port_forward"),
    ),
    "model_registry": ("model_registry",),
}
"""Addresses that get a secret, with the settings that choose the address or the secret."""


def setting(default: T, description: str, **more: str | float) -> T:
    """Return a described field; `more` may have bounds, and `variable`, one of the environment."""
    return field(default=default, metadata={"description": description, **more})


@dataclass(frozen=True)
class Connection:
    """Address of KFP, and the login."""

    host: str = setting(
        "",
        "Address of KFP, such as https://kubeflow.example.com/pipeline; empty for the service of "
        "the cluster that this runs in, or a port forwarded through the kubeconfig.",
        variable="KF_PIPELINES_ENDPOINT",
    )
    namespace: str = setting(
        "",
        "Namespace of the runs: your profile where KFP has several users; empty for the pod's own, "
        "or the kubeconfig's.",
    )
    kfp_namespace: str = setting("kubeflow", "Namespace that KFP itself runs in.")
    context: str = setting("", "Context of the kubeconfig; empty for the current one.")
    port_forward: bool = setting(
        False, "Reach KFP by a port forwarded through the kubeconfig, even if a host is set."
    )
    token_file: str = setting(
        "", "File with a token, read for each request; KFP_DDP_TOKEN is the value."
    )
    cookie_file: str = setting(
        "",
        "File with the cookie of a session, such as authservice_session=MTY1...; KFP_DDP_COOKIE "
        "is the value.",
    )
    username: str = setting("", "User of the Dex of a Kubeflow platform: an e-mail address.")
    password_file: str = setting("", "File with the password; KFP_DDP_PASSWORD is the value.")
    iap_client_id: str = setting(
        "",
        "Client of Google's Identity-Aware Proxy in front of KFP.",
        variable="KF_PIPELINES_IAP_OAUTH2_CLIENT_ID",
    )
    ca_file: str = setting("", "File with the certificates to trust; empty for the system's.")
    ui: str = setting(
        "",
        "Address of the UI for links to runs; empty for the host.",
        variable="KF_PIPELINES_UI_ENDPOINT",
    )
    timeout: float = setting(30.0, "Timeout of a request, in seconds.", gt=0)
    untrusted: str = ""
    """Why nothing may be sent to the host; not a setting."""

    def run_page(self, run_id: str) -> str:
        """Return the address of a run in the UI; '' if it is not known."""
        ui = self.ui or ("" if self.port_forward else self.host)
        return f"{ui.rstrip('/')}/#/runs/details/{run_id}" if ui else ""


@dataclass(frozen=True)
class Config(Connection):
    """All configuration."""

    experiment: str = setting("Default", "Experiment of new runs.")
    registry: str = setting("ghcr.io/kfp-ddp", "Registry of the launcher and trainer images.")
    launcher_image: str = setting("", "Image to use as launcher.")
    trainer_image: str = setting(
        "", "Image to use as trainer, such as one built from ours with more packages."
    )
    destination: str = setting("", "Destination of exported models: gs://, s3:// or a folder.")
    model_registry: str = setting(
        "",
        "Kubeflow Model Registry that promote and rollback update, such as http://localhost:8080; "
        "KFP_DDP_MODEL_REGISTRY_TOKEN may hold a token for it.",
    )
    pipeline_root: str = setting("", "Folder of KFP's artifacts; empty for the server's default.")
    service_account: str = setting("", "Account of the steps; empty for the server's default.")
    time_zone: str = setting(
        "UTC",
        "Time zone of schedules: CRON_SCHEDULE_TIMEZONE of KFP's server.",
    )


class Set(NamedTuple):
    """A value with its origin: flag, environment variable, file or default."""

    value: Any
    origin: str


FIELDS = {item.name: item for item in fields(Config) if item.metadata}


def files() -> list[Path]:
    """Return the files of settings, the one with priority first."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return [Path(HERE), Path(home, "kfp-ddp", "config.yaml")]


def resolved(flags: Mapping[str, Any] | None = None) -> dict[str, Set]:
    """Return each setting with its origin; a flag of None is not set."""
    own, folder = _layers(flags)
    return own | folder


def untrusted(address: str, flags: Mapping[str, Any] | None = None) -> str:
    """Return why nothing may be sent to the address of a setting; '' if the user chose it.

    The current folder may be a stranger's: its file chooses who gets a secret, or which secret,
    only if the user's own settings name the same address, or have the same values.
    """
    own, folder = _layers(flags)
    values = {name: item.value for name, item in (own | folder).items()}
    names = [name for name in GUARDED[address] if values[name] != own[name].value]
    used = values[address] and not (address == "host" and values["port_forward"])
    if not names or (used and values[address].rstrip("/") == own[address].value.rstrip("/")):
        return ""
    lines = ", ".join(f"{name}: {values[name]}" for name in ([address] if used else names))
    return (
        f"{HERE} of this folder sets {', '.join(names)}, which decides where your login is sent, "
        f"and your own settings do not name this {address}: if you trust the folder, write {lines} "
        f"into {files()[1]}, or give it as an option"
    )


def _layers(flags: Mapping[str, Any] | None) -> tuple[dict[str, Set], dict[str, Set]]:
    """Return the user's own settings, and those of the folder that have priority over them."""
    here, home = files()
    own = {name: Set(item.default, "default") for name, item in FIELDS.items()}
    own |= {name: Set(value, str(home)) for name, value in _read_file(home)}
    more = _read_environment()
    more |= {name: Set(value, "flag") for name, value in (flags or {}).items() if value is not None}
    folder = {name: Set(value, HERE) for name, value in _read_file(here) if name not in more}
    return own | more, folder


def config(flags: Mapping[str, Any] | None = None) -> Config:
    """Return the settings; see `resolved`."""
    return Config(**{name: item.value for name, item in resolved(flags).items()})


def _read_environment() -> dict[str, Set]:
    values = {}
    for name, item in FIELDS.items():
        for variable in (item.metadata.get("variable"), PREFIX + name.upper()):
            text = os.environ.get(variable) if variable else None
            if text:
                values[name] = Set(_typed(name, text, str(variable)), str(variable))
    return values


def _read_file(path: Path) -> Iterator[tuple[str, Any]]:
    if not path.exists():
        return
    import yaml  # only where there is a file

    from kfp_ddp.core.files import read_below  # not on Windows

    try:
        text = read_below(path.resolve().parent, path.resolve().name, _LARGEST).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"cannot read {path}: {reason}") from None

    try:
        content = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not YAML: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} needs lines such as host: https://kubeflow.example.com")
    for name, value in content.items():
        if name not in FIELDS:
            from kfp_ddp.core.settings import hint

            raise InputError(f"{path}: there is no setting {name!r}{hint(str(name), [*FIELDS])}")
        yield name, _typed(name, value, str(path))


def _typed(name: str, value: Any, origin: str) -> Any:
    kind = get_type_hints(Config)[name]
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if kind is bool and isinstance(value, str):
        value = words.get(value.lower(), value)
    if kind is float:
        try:
            value = float(value)
        except (TypeError, ValueError):
            value = str(value)
        if isinstance(value, float) and not 0 < value < float("inf"):
            raise InputError(f"{origin}: {name}={value:g} should be more than 0")
    if not isinstance(value, kind):
        expected = {bool: "true or false", float: "a number", str: "text"}[kind]
        raise InputError(f"{origin}: {name}={one_line(reprlib.repr(value))} should be {expected}")
    return value
