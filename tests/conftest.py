"""Settings and fixtures of all tests."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kfp_ddp.core.errors import KfpDdpError

if TYPE_CHECKING:
    from tests.kfp_server.server import KfpServer

CHECKOUT = Path(__file__).parents[1]
MADE = {".git", ".venv", "__pycache__", "build", "dist"}
"""Folders of the checkout with generated or external content."""

# Threads of torch wait for each other if tests use more threads than cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test may reach the internet for weights.
os.environ["KFP_DDP_WEIGHTS"] = "off"

# Processes inherit that a runner in the background ignores SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the soak tests out unless `-m soak` asks for them."""
    if "soak" in (config.option.markexpr or ""):
        return
    soak = [item for item in items if item.get_closest_marker("soak")]
    config.hook.pytest_deselected(items=soak)
    items[:] = [item for item in items if item not in soak]


@pytest.fixture(scope="session", autouse=True)
def surroundings_stay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Check that tests change no mode or owner outside of their own folders.

    TMPDIR is one of these.
    """
    around = list(tmp_path_factory.getbasetemp().parents)
    for folder, folders, files in os.walk(CHECKOUT):
        folders[:] = [name for name in folders if name not in MADE and name[0] != "."]
        around += [Path(folder, name) for name in (".", *files)]
    seen = rights(around)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        patch.setattr(tempfile, "tempdir", None)
        yield
    after = rights(list(seen))
    changed = [path for path, found in after.items() if found != seen[path]]
    assert not changed, f"a test changed mode or owner of {', '.join(map(str, changed))}"


@pytest.fixture(scope="session", autouse=True)
def own_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give commands a user without settings, and with a key of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="session", autouse=True)
def messages_are_one_line() -> Iterator[None]:
    """Check the message of each error that a test causes in its own process."""

    def create(self: KfpDdpError, *values: object) -> None:
        assert not any("\n" in str(value) for value in values), values
        super(KfpDdpError, self).__init__(*values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KfpDdpError, "__init__", create)
        yield


def rights(paths: list[Path]) -> dict[Path, tuple[int, int, int]]:
    """Return mode and owner of existing paths."""
    found = {}
    for path in paths:
        if os.path.lexists(path):
            seen = path.lstat()
            found[path] = (seen.st_mode, seen.st_uid, seen.st_gid)
    return found


@pytest.fixture
def kfp_server() -> "Iterator[KfpServer]":
    """An empty KFP API server of one user; it fails for requests that KFP does not know."""
    from tests.kfp_server.server import serving

    with serving() as server:
        yield server
    assert not server.violations


@pytest.fixture
def configured(kfp_server: "KfpServer", monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Configure the server and the default registry, in an empty folder without a cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    settings = tmp_path / ".config" / "kfp-ddp" / "config.yaml"
    settings.parent.mkdir(parents=True)
    settings.write_text("registry: ghcr.io/kfp-ddp\n")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("KFP_DDP_HOST", kfp_server.url)
