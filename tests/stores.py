"""Stores as they are run elsewhere: versitygw and Azurite, installed once for all tests."""

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import free_port

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kfp-ddp-test-servers"
VERSITY = "v1.8.0"
AZURITE = "3.37.0"
SECONDS = 900


def installed(server: Path, tool: str, command: list[str], **settings: str) -> Path:
    """A server's program; installed by this command where it is not there.

    Skips the test where the tool that installs it is not there, or cannot.
    """
    if not server.exists():
        if not shutil.which(tool):
            pytest.skip(f"{server.name} is not installed, and {tool} neither, which installs it")
        CACHE.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            command, env=os.environ | settings, capture_output=True, text=True, timeout=SECONDS
        )
        if done.returncode:
            pytest.skip(f"{server.name} cannot be installed: {done.stderr.strip()[-200:]}")
    return server


@contextlib.contextmanager
def versitygw(folder: Path, key: str, secret: str, host: str = "127.0.0.1") -> Iterator[str]:
    """An S3 server that keeps buckets as folders of `folder`; yields its URL."""
    server = installed(
        CACHE / "bin" / "versitygw",
        "go",
        ["go", "install", f"github.com/versity/versitygw/cmd/versitygw@{VERSITY}"],
        GOBIN=str(CACHE / "bin"),
    )
    address = f"{host}:{free_port()}"
    command = [str(server), "--port", address, "--access", key, "--secret", secret]
    ready = re.compile(rf"(http://{re.escape(host)}:\d+)")
    with _running([*command, "posix", str(folder)], folder.with_suffix(".log"), ready) as url:
        yield url


@contextlib.contextmanager
def azurite(log: Path) -> Iterator[str]:
    """An Azure Blob server that keeps all in memory; yields its URL."""
    home = CACHE / "azurite"
    server = installed(
        home / "node_modules" / ".bin" / "azurite-blob",
        "npm",
        ["npm", "install", "--prefix", str(home), "--no-audit", f"azurite@{AZURITE}"],
    )
    command = [str(server), "--inMemoryPersistence", "--disableTelemetry", "--blobPort", "0"]
    ready = re.compile(r"successfully listens on (http://\S+)")
    with _running([*command, "--skipApiVersionCheck"], log, ready) as url:
        yield url


@contextlib.contextmanager
def _running(command: list[str], log: Path, ready: re.Pattern[str]) -> Iterator[str]:
    """Run a server for the length of a block; yields the address that its log tells."""
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        while not (found := ready.search(log.read_text())):
            assert server.poll() is None, log.read_text()[-500:]
            time.sleep(0.1)
        yield found[1]
    finally:
        server.terminate()
        server.wait()
