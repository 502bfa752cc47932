"""Configuration: by flag, environment, a file of the folder or of the user, or default.

Not a pydantic model, as that import is most of the time of a command's `--help`.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line

T = TypeVar("T")
PREFIX = "KFP_DDP_"
HERE = "kfp-ddp.yaml"
GUARDED = {
    "host": (
        *("host", "ca_file", "token_file", "cookie_file"),
        *("username", "password_file", "iap_client_id"),
    ),
    "model_registry": ("model_registry",),
}
"""Addresses that get a secret, with the settings that choose the address or the secret."""


def setting(default: T, description: str, **more: str) -> T:
    """A field, with its text; `more` may name another environment variable that sets it."""
    return field(default=default, metadata={"description": description, **more})


@dataclass(frozen=True)
class Connection:
    """How to reach KFP, and as whom."""

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
        False, "Reach KFP by a port forwarded through the kubeconfig, whatever host is set."
    )
    token_file: str = setting(
        "", "File with a token, read again for each request; KFP_DDP_TOKEN holds one itself."
    )
    cookie_file: str = setting(
        "",
        "File with the cookie of a session, as in authservice_session=MTY1...; KFP_DDP_COOKIE "
        "holds one itself.",
    )
    username: str = setting("", "Who logs in at the Dex of a Kubeflow platform: an e-mail address.")
    password_file: str = setting("", "File with the password; KFP_DDP_PASSWORD holds one itself.")
    iap_client_id: str = setting(
        "",
        "Client of Google's Identity-Aware Proxy in front of KFP.",
        variable="KF_PIPELINES_IAP_OAUTH2_CLIENT_ID",
    )
    ca_file: str = setting("", "File with the certificates to trust; empty for the usual ones.")
    ui: str = setting(
        "",
        "Address of the UI for links to runs; empty for the host.",
        variable="KF_PIPELINES_UI_ENDPOINT",
    )
    timeout: float = setting(30.0, "The longest wait for an answer, in seconds.")

    def run_page(self, run_id: str) -> str:
        """Address of a run in the UI; '' where none is known."""
        ui = self.ui or ("" if self.port_forward else self.host)
        return f"{ui.rstrip('/')}/#/runs/details/{run_id}" if ui else ""


@dataclass(frozen=True)
class Config(Connection):
    """All configuration; flags of a command have priority."""

    experiment: str = setting("Default", "Experiment that runs are listed under.")
    registry: str = setting("ghcr.io/kfp-ddp", "Where launcher and trainer images are pulled from.")
    launcher_image: str = setting("", "Another image in place of the launcher.")
    trainer_image: str = setting(
        "", "Another image in place of the trainer, such as one built from it with more packages."
    )
    destination: str = setting("", "Where models are exported to: gs://, s3:// or a folder.")
    model_registry: str = setting(
        "",
        "Kubeflow Model Registry that promote and rollback update, such as http://localhost:8080; "
        "KFP_DDP_MODEL_REGISTRY_TOKEN may hold a token for it.",
    )
    pipeline_root: str = setting("", "Where KFP keeps artifacts; empty for the server's choice.")
    service_account: str = setting("", "Account that steps run as; empty for the server's choice.")
    time_zone: str = setting(
        "UTC",
        "Zone that KFP reads schedules in: CRON_SCHEDULE_TIMEZONE of its server, one for all.",
    )


class Set(NamedTuple):
    """A value, and where it is from."""

    value: Any
    origin: str


FIELDS = {item.name: item for item in fields(Config)}


def files() -> list[Path]:
    """Where settings may stand, the first that sets one counts."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return [Path(HERE), Path(home, "kfp-ddp", "config.yaml")]


def resolved(flags: Mapping[str, Any] | None = None) -> dict[str, Set]:
    """Each setting with where it is from: flag, environment, file or default.

    Args:
        flags: Flags of the command line; None if not set.

    Raises:
        InputError: a file or variable that cannot be used.
    """
    own, folder = _layers(flags)
    return own | folder


def check_trusted(address: str, flags: Mapping[str, Any] | None = None) -> None:
    """Refuse a file of the current folder that chooses who gets a secret, or which secret.

    The folder may be a stranger's: the user's own settings must name the same address.

    Args:
        address: Its setting, one of GUARDED.
        flags: As for `resolved`.

    Raises:
        InputError: the address is that of the folder alone.
    """
    own, folder = _layers(flags)
    names = [name for name in GUARDED[address] if name in folder]
    value = (own | folder)[address].value
    if names and not (value and value.rstrip("/") == own[address].value.rstrip("/")):
        trust = f"write {address}: {value}" if value else f"write them and {address}"
        raise InputError(
            f"{HERE} of this folder sets {', '.join(names)}, which decides where your login is "
            f"sent, and your own settings do not name this {address}: if you trust the folder, "
            f"{trust} into {files()[1]}, or set --{address.replace('_', '-')}"
        )


def _layers(flags: Mapping[str, Any] | None) -> tuple[dict[str, Set], dict[str, Set]]:
    """Return the user's own settings, and those of the folder that have priority over them."""
    here, home = files()
    own = {name: Set(item.default, "default") for name, item in FIELDS.items()}
    own |= {name: Set(value, str(home)) for name, value in _of_file(home)}
    more = _of_environment()
    more |= {name: Set(value, "flag") for name, value in (flags or {}).items() if value is not None}
    folder = {name: Set(value, HERE) for name, value in _of_file(here) if name not in more}
    return own | more, folder


def config(flags: Mapping[str, Any] | None = None) -> Config:
    """The values alone."""
    return Config(**{name: item.value for name, item in resolved(flags).items()})


def _of_environment() -> dict[str, Set]:
    values = {}
    for name, item in FIELDS.items():
        for variable in (item.metadata.get("variable"), PREFIX + name.upper()):
            text = os.environ.get(variable) if variable else None
            if text:
                values[name] = Set(_typed(name, text, str(variable)), str(variable))
    return values


def _of_file(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"cannot read {path}: {reason}") from None
    import yaml  # only where there is a file

    try:
        content = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not YAML: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} should hold lines such as host: https://kubeflow.example.com")
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
        raise InputError(f"{origin}: {name}={value!r} should be {expected}")
    return value
