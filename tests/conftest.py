"""What holds for all tests."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from click.testing import Result

    from tests.kfp_server.server import KfpServer

CHECKOUT = Path(__file__).parents[1]
MADE = {".git", ".venv", "__pycache__", "build", "dist"}
"""Folders of the checkout whose content is made from the rest, or is not ours."""

# Tests are more than the cores, and threads of torch that wait for each other there stand still.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A runner in the background ignores SIGINT, and so would every process that a test interrupts.
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
    """At the end of a run all around the tests' own folders has the modes and owners it had.

    What tests start finds its temporary folder among theirs.
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


def rights(paths: list[Path]) -> dict[Path, tuple[int, int, int]]:
    """Mode and owner of those that are there."""
    found = {}
    for path in paths:
        if os.path.lexists(path):
            seen = path.lstat()
            found[path] = (seen.st_mode, seen.st_uid, seen.st_gid)
    return found


@pytest.fixture
def kfp_server() -> "Iterator[KfpServer]":
    """A KFP API server of one user, without anything; it saw no request that KFP does not know."""
    from tests.kfp_server.server import serving

    with serving() as server:
        yield server
    assert not server.violations


@pytest.fixture
def call(
    kfp_server: "KfpServer", monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> "Callable[..., Result]":
    """Runs a command of the program against the server, in an empty folder."""
    from click.testing import CliRunner

    from kfp_ddp.cli import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("KFP_DDP_HOST", kfp_server.url)
    return lambda *words: CliRunner().invoke(app, list(words))
