"""Configuration by flag, variable, file or default; not of pydantic, whose import is slow."""

import os
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line, yaml_of

T = TypeVar("T")
PREFIX = "KFP_DDP_"
FILE = "KFP_DDP_CONFIG"
"""Environment variable with the file of settings, in place of the user's own."""
RETIRED = "kfp-ddp.yaml"
"""File of the current folder that 0.1.0 read, which is not read any more."""
_LARGEST = 1 << 20
"""Bytes of a file of settings."""


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

    def run_page(self, run_id: str) -> str:
        """Return the address of a run in the UI; '' if it is not known."""
        ui = self.ui or ("" if self.port_forward else self.host)
        return f"{ui.rstrip('/')}/#/runs/details/{run_id}" if ui else ""


@dataclass(frozen=True)
class Config(Connection):
    """All configuration."""

    experiment: str = setting("Default", "Experiment of new runs.")
    images: str = setting(
        "",
        "public: images that everybody can pull, with our source from a ConfigMap; registry: those "
        "of your registry; empty for registry where one is set, else public.",
    )
    registry: str = setting("", "Registry of the launcher and trainer images.")
    launcher_image: str = setting("", "Image to use as launcher, or a mirror of the public one.")
    trainer_image: str = setting(
        "", "Image to use as trainer, such as one built from ours with more packages."
    )
    pip_index_url: str = setting(
        "", "Package index of pods with public images; empty for that of pip."
    )
    pip_proxy: str = setting("", "Proxy through which these pods reach it.")
    destination: str = setting("", "Destination of exported models: gs://, s3:// or a folder.")
    model_registry: str = setting(
        "",
        "Registry that promote and rollback update: Kubeflow Model Registry, such as "
        "http://localhost:8080, for which KFP_DDP_MODEL_REGISTRY_TOKEN may hold a token, or mlflow "
        "for the server that MLFLOW_TRACKING_URI names.",
    )
    pipeline_root: str = setting("", "Folder of KFP's artifacts; empty for the server's default.")
    service_account: str = setting("", "Account of the steps; empty for the server's default.")
    time_zone: str = setting(
        "UTC", "Time zone of schedules: CRON_SCHEDULE_TIMEZONE of KFP's server."
    )


class Set(NamedTuple):
    """A value with its origin: flag, environment variable, file or default."""

    value: Any
    origin: str


FIELDS = {item.name: item for item in fields(Config)}
CONNECTION = tuple(Connection.__dataclass_fields__)


def connection(flags: Mapping[str, Any]) -> Connection:
    """Return the configured connection."""
    return Connection(**chosen(*CONNECTION, flags=flags))


def checked(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a program gives; raise InputError for a wrong name or type."""
    return {
        name: _checked(name, value, "Client") for name, value in flags.items() if value is not None
    }


def own_folder() -> Path:
    """Return the user's own configuration folder, never one below the current folder."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(home):  # such a value does not count, says its specification
        home = os.path.expanduser("~/.config")
    return Path(os.sep, home, "kfp-ddp")  # without a home the ~ stays


def file() -> Path:
    """Return the file of settings."""
    return Path(os.environ.get(FILE) or own_folder() / "config.yaml")


def resolved(flags: Mapping[str, Any] | None = None) -> dict[str, Set]:
    """Return each setting with its origin; a flag of None is not set."""
    path = file()
    values = {name: Set(item.default, "default") for name, item in FIELDS.items()}
    values |= {name: Set(value, str(path)) for name, value in _read_file(path)}
    values |= _read_environment()
    for name, value in (flags or {}).items():
        if value is not None:
            values[name] = Set(value, "flag")
    return values


def chosen(*names: str, flags: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the values of settings."""
    values = resolved(flags)
    return {name: values[name].value for name in names}


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
        if os.environ.get(FILE):
            raise InputError(f"{FILE} names {path}, which does not exist: correct it, or unset it")
        return
    try:
        text = _content(path).decode()
    except UnicodeDecodeError:
        raise InputError(f"cannot read {path}: it is not text") from None
    try:
        content = yaml_of(text) or {}
    except InputError as error:
        raise InputError(f"{path} {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} needs lines such as host: https://kubeflow.example.com")
    for name, value in content.items():
        yield name, _checked(name, value, str(path))


def _checked(name: str, value: Any, origin: str) -> Any:
    if name not in FIELDS:
        from kfp_ddp.core.settings import hint

        raise InputError(f"{origin}: there is no setting {name!r}{hint(str(name), [*FIELDS])}")
    return _typed(name, value, origin)


def _content(path: Path) -> bytes:
    from kfp_ddp.core.files import read_below  # not on Windows

    try:
        return read_below(path.resolve().parent, path.resolve().name, _LARGEST)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


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
    if not isinstance(value, str):
        return value
    from kfp_ddp.core.secrets import reason  # its patterns take 10 ms, and most users set little

    if why := reason(value):
        raise InputError(f"{origin}: {name} {why}: settings are shown, so give it without")
    return value
