"""Servers as they are run elsewhere, installed once for all tests: stores, Prometheus."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.serving import free_port

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kfp-ddp-test-servers"
VERSITY = "v1.8.0"
AZURITE = "3.37.0"
REGISTRY = "v3.1.2"
SCHEDULER_PLUGINS = "sigs.k8s.io/scheduler-plugins@v0.31.8"
SECONDS = 900


def installed(server: Path, tool: str, command: list[str], **settings: str) -> Path:
    """A server's program; installed by this command in the cache where it is not there.

    Skips the test where the tool that installs it is not there, or cannot.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers of pytest-xdist may need it as well
        if server.exists():
            return server
        if not shutil.which(tool):
            pytest.skip(f"{server.name} is not installed, and {tool} neither, which installs it")
        env = os.environ | settings
        done = subprocess.run(
            command, cwd=CACHE, env=env, capture_output=True, text=True, timeout=SECONDS
        )
        if done.returncode:
            pytest.skip(f"{server.name} cannot be installed: {done.stderr.strip()[-200:]}")
    return server


def _from_go(name: str, package: str) -> Path:
    """A program that is built from a released Go module."""
    command = ["go", "install", package]
    return installed(CACHE / "bin" / name, "go", command, GOBIN=str(CACHE / "bin"), CGO_ENABLED="0")


@contextlib.contextmanager
def versitygw(folder: Path, key: str, secret: str, host: str = "127.0.0.1") -> Iterator[str]:
    """An S3 server that keeps buckets as folders of `folder`; yields its URL."""
    server = _from_go("versitygw", f"github.com/versity/versitygw/cmd/versitygw@{VERSITY}")
    address = f"{host}:{free_port()}"
    command = [str(server), "--port", address, "--access", key, "--secret", secret]
    ready = re.compile(rf"(http://{re.escape(host)}:\d+)")
    with running([*command, "posix", str(folder)], folder.with_suffix(".log"), ready) as url:
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
    with running([*command, "--skipApiVersionCheck"], log, ready) as url:
        yield url


def registry_program() -> Path:
    """The reference registry of container images: one static program."""
    package = f"github.com/distribution/distribution/v3/cmd/registry@{REGISTRY}"
    return _from_go("registry", package)


def coscheduler() -> tuple[Path, Path]:
    """Scheduler-plugins' scheduler, and the definition of its PodGroup.

    Its module has replacements, which `go install` refuses; the one here is of any patch version.
    """
    source = CACHE / "scheduler-plugins"
    script = f"""set -e
        module=$(go mod download -json {SCHEDULER_PLUGINS} | sed -n 's/.*"Dir": "\\(.*\\)".*/\\1/p')
        rm -rf {source} && cp -r "$module" {source} && chmod -R u+w {source} && cd {source}
        go mod edit -replace=k8s.io/cloud-provider=k8s.io/cloud-provider@v0.31.0
        go build -o bin/ ./cmd/scheduler"""
    settings = {"GOFLAGS": "-mod=mod -trimpath", "CGO_ENABLED": "0"}
    command = ["bash", "-c", script]
    program = installed(source / "bin" / "scheduler", "go", command, **settings)
    return program, source / "manifests" / "coscheduling" / "crd.yaml"


@contextlib.contextmanager
def registry(folder: Path, log: Path, logins: str = "") -> Iterator[str]:
    """A registry of the images in `folder`, which may need a login of htpasswd; yields its host."""
    address, ready = f"127.0.0.1:{free_port()}", re.compile(r"listening on (127[\d.:]+)")
    settings: dict[str, Any] = {
        "version": "0.1",
        "storage": {"filesystem": {"rootdirectory": str(folder)}},
        "http": {"addr": address},
    }
    if logins:
        log.with_suffix(".logins").write_text(logins)
        settings["auth"] = {"htpasswd": {"realm": "r", "path": str(log.with_suffix(".logins"))}}
    log.with_suffix(".yaml").write_text(json.dumps(settings))
    command = [str(registry_program()), "serve", str(log.with_suffix(".yaml"))]
    with running(command, log, ready) as host:
        yield host


def prometheus_program(name: str) -> str:
    """A program of Debian's package of Prometheus: `prometheus` itself or `promtool`."""
    unpack = "apt-get download prometheus && dpkg --extract prometheus_*.deb prometheus"
    program = CACHE / "prometheus" / "usr" / "bin" / name
    return str(installed(program, "dpkg", ["sh", "-c", unpack]))


@contextlib.contextmanager
def prometheus(config: Path) -> Iterator[str]:
    """A Prometheus that scrapes as its file of settings says; yields its URL."""
    address = f"127.0.0.1:{free_port()}"
    command = [prometheus_program("prometheus"), f"--web.listen-address={address}"]
    command += [f"--config.file={config}", f"--storage.tsdb.path={config.with_suffix('.data')}"]
    ready = re.compile(r"(Server is ready to receive web requests)")
    with running(command, config.with_suffix(".log"), ready):
        yield f"http://{address}"


@contextlib.contextmanager
def mlflow(folder: Path, password: str) -> Iterator[str]:
    """An MLflow server that keeps its runs in `folder`, with the login `admin`; yields its URL."""
    home = CACHE / f"mlflow-{metadata.version('mlflow-skinny')}"
    package = f"mlflow[auth]=={metadata.version('mlflow-skinny')}"
    install = f"{sys.executable} -m venv {home} && {home}/bin/pip install --quiet '{package}'"
    server = installed(home / "bin" / "mlflow", "sh", ["sh", "-c", install])
    command = [str(server), "server", "--port", str(free_port()), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/runs.db", "--app-name", "basic-auth"]
    settings = {
        "MLFLOW_AUTH_ADMIN_PASSWORD": password,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "secret",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    ready = re.compile(r"running on (http://\S+)")
    with running(command, folder / "log", ready, **settings) as url:
        yield url


@contextlib.contextmanager
def running(
    command: list[str], log: Path, ready: re.Pattern[str], **settings: str
) -> Iterator[str]:
    """Run a server for the length of a block; yields the address that its log tells."""
    with log.open("w") as out:
        where: dict[str, Any] = {"cwd": log.parent, "env": os.environ | settings}
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, **where)
    try:
        while not (found := ready.search(log.read_text())):
            assert server.poll() is None, log.read_text()[-500:]
            time.sleep(0.1)
        yield found[1]
    finally:
        server.terminate()
        server.wait()
