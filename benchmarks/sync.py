"""Syncing a bucket against google-cloud-storage's transfer manager, rclone and s5cmd.

Ratios > 1: ours is faster. Every client is a process of its own, timed from start to end, writing
to the same kind of folder from the same local server (`gcs_server`, built with Go, or versitygw for
S3), in turn, for a few rounds; medians.

- `small_vs_transfer_manager`, `small_vs_rclone_default`, `small_vs_rclone_tuned`: 2,000 objects
  of 20 KB over TLS with 30 ms before each answer; both as they come, and, tuned, both with the
  better of 64 and 128 connections.
- `cpu_us_per_small_file`: our processor time for 10,000 such objects without latency or TLS,
  start and listing included, in microseconds; `small_cpu_vs_rclone`: rclone's with 16 connections,
  at which it takes least, against it, as microseconds are those of a machine.
- `s3_small_vs_rclone_tuned`, `s3_small_vs_s5cmd`, `s3_cpu_us_per_small_file`: the same 10,000 on
  S3; rclone with the better of 16 and 64 connections.
- `big_vs_rclone`, `big_tls_vs_rclone`: 20 objects of 50 MB.
- `unchanged_vs_rclone`: a second sync of 50,000 objects.
- `million_listing_mb`: peak memory of a listing of 1,000,000 objects and its digest, in MB.
"""

import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROUNDS = 3
VERSITY = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"
KEY = {"AWS_ACCESS_KEY_ID": "access", "AWS_SECRET_ACCESS_KEY": "secret"}
OURS = "from kfp_ddp.cli import main; main()"
TRANSFER_MANAGER = """
import sys
from google.cloud import storage
from google.cloud.storage import transfer_manager
bucket = storage.Client(project="none").bucket(sys.argv[1])
names = [blob.name for blob in bucket.list_blobs(prefix="ds/")]
transfer_manager.download_many_to_path(
    bucket, names, destination_directory=sys.argv[2], raise_exception=True)
"""
LISTING = """
import pathlib, sys
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.sync import sync
result = sync("gs://million/ds", pathlib.Path(sys.argv[1]), SyncOptions(dry_run=True))
assert result.files == 1_000_000
"""


@dataclass
class Server:
    """The two addresses of a running bucket, and the certificate to trust."""

    plain: str
    secure: str
    certificate: Path

    def environment(self, endpoint: str) -> dict[str, str]:
        """Return the environment variables by which clients find the bucket."""
        certificate = str(self.certificate)
        # An installed package has its bytecode, whatever this shell says.
        shell = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        return shell | {
            "STORAGE_EMULATOR_HOST": endpoint,
            "SSL_CERT_FILE": certificate,
            "REQUESTS_CA_BUNDLE": certificate,
            "RCLONE_CONFIG": os.devnull,
        }


@dataclass
class Cost:
    """Of one process: seconds, seconds of processor, peak memory in MB."""

    wall: float
    cpu: float
    memory: float


def run() -> dict[str, float]:
    """Measure, print a table, and return the figures by name."""
    with contextlib.ExitStack() as stack:
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=base)))
        program = build(folder)
        if program is None:
            return {}
        figures = _small(program, folder) | _processor(program, folder) | _s3(folder)
        figures |= _big(program, folder) | _unchanged(program, folder)
        return figures | _million(program, folder)


def build(folder: Path) -> Path | None:
    """Return KFP_DDP_BENCH_SERVER, or the server built with Go; print why and return None."""
    if given := os.environ.get("KFP_DDP_BENCH_SERVER"):
        return Path(given)
    if not shutil.which("go"):
        print("go is missing: install it to build benchmarks/gcs_server")
        return None
    program = folder / "gcs-server"
    source = Path(__file__).parent / "gcs_server"
    subprocess.run(["go", "build", "-o", program, "."], cwd=source, check=True)
    return program


@contextlib.contextmanager
def serve(program: Path, folder: Path, **flags: object) -> Iterator[Server]:
    """Run the server with these flags; yield its addresses."""
    certificate = folder / "cert.pem"
    sizes = {"small": 1, "large": 1, "many": 1, "million": 1} | flags
    arguments = [f"-{name}={value}" for name, value in sizes.items()]
    with subprocess.Popen(
        [program, f"-cert={certificate}", *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        try:
            plain, secure = process.stdout.readline().split()
            yield Server(f"http://127.0.0.1:{plain}", f"https://127.0.0.1:{secure}", certificate)
        finally:
            process.kill()


def measure(command: list[str], environment: dict[str, str]) -> Cost:
    """Run a client to its end.

    Raises:
        subprocess.CalledProcessError: it failed; nothing is measured of a failure.
    """
    with tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            print(log.read().decode(errors="replace")[-2000:])
            raise subprocess.CalledProcessError(process.returncode, command)
    return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


@contextlib.contextmanager
def serve_s3(folder: Path) -> Iterator[dict[str, str]]:
    """Run versitygw, installed with Go if it is missing; yields the environment for its clients."""
    program = shutil.which("versitygw") or str(folder / "versitygw")
    if not os.path.exists(program):
        subprocess.run(["go", "install", VERSITY], env=os.environ | {"GOBIN": folder}, check=True)
    buckets, port = folder / "s3", free_port()
    (buckets / "small").mkdir(parents=True)
    options = ["--port", f"127.0.0.1:{port}", "--keep-alive", "--quiet"]
    account = ["--access", KEY["AWS_ACCESS_KEY_ID"], "--secret", KEY["AWS_SECRET_ACCESS_KEY"]]
    with subprocess.Popen(
        [program, *options, *account, "posix", str(buckets)], stdout=subprocess.DEVNULL
    ) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            addresses = {"AWS_ENDPOINT_URL_S3": url, "S3_ENDPOINT_URL": url}
            region = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_REGION": "us-east-1"}
            shell = {k: v for k, v in os.environ.items() if k != "AWS_CA_BUNDLE"}
            yield shell | addresses | region | KEY | {"RCLONE_CONFIG": os.devnull}
        finally:
            process.kill()
            shutil.rmtree(buckets)


def ours(bucket: str, target: Path, *flags: str) -> list[str]:
    """Our command."""
    url = bucket if "://" in bucket else f"gs://{bucket}/ds"
    return [sys.executable, "-c", OURS, "sync", "-q", *flags, url, str(target)]


def rclone(endpoint: str, bucket: str, target: Path, *flags: str) -> list[str]:
    """The peer's command."""
    where = ["--gcs-endpoint", f"{endpoint}/storage/v1/", "--gcs-anonymous"]
    return ["rclone", "copy", *where, *flags, f":gcs:{bucket}/ds", str(target)]


def compare(
    title: str,
    folder: Path,
    clients: dict[str, Callable[[Path], list[str]]],
    environment: dict[str, str],
    fresh: bool = True,
) -> dict[str, Cost]:
    """Return the median costs of the clients, run in turn; `fresh`: into empty folders."""
    costs: dict[str, list[Cost]] = {name: [] for name in clients}
    for _ in range(ROUNDS):
        for name, command in clients.items():
            target = folder / name.replace(" ", "-")
            if fresh:
                shutil.rmtree(target, ignore_errors=True)
            target.mkdir(exist_ok=True)
            costs[name].append(measure(command(target), environment))
    for name in clients:
        if fresh:
            shutil.rmtree(folder / name.replace(" ", "-"), ignore_errors=True)
    print(f"\n{title}")
    medians = {}
    for name, rounds in costs.items():
        medians[name] = Cost(
            *(statistics.median(getattr(c, part) for c in rounds) for part in Cost.__match_args__)
        )
        median = medians[name]
        print(f"  {name:28} {median.wall:8.2f} s  cpu {median.cpu:7.2f} s  {median.memory:6.0f} MB")
    return medians


def _rclone_small(endpoint: str, count: str, target: Path) -> list[str]:
    return rclone(endpoint, "small", target, "--transfers", count, "--checkers", count)


def _rclone_large(endpoint: str, target: Path) -> list[str]:
    return rclone(endpoint, "large", target)


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def _peers(*names: str) -> bool:
    missing = [name for name in names if not shutil.which(name)]
    for name in missing:
        print(f"{name} is missing: install it to compare")
    return not missing


def _small(program: Path, folder: Path) -> dict[str, float]:
    with serve(program, folder, small=2000, latency="30ms") as server:
        clients: dict[str, Callable[[Path], list[str]]] = {
            "kfp-ddp sync": lambda target: ours("small", target),
            "kfp-ddp sync 128": lambda target: ours("small", target, "-j", "128"),
            "transfer manager": lambda target: [
                sys.executable, "-c", TRANSFER_MANAGER, "small", str(target),
            ],
        }  # fmt: skip
        if _peers("rclone"):
            clients["rclone"] = lambda target: rclone(server.secure, "small", target)
            for count in ("64", "128"):
                clients[f"rclone {count}"] = partial(_rclone_small, server.secure, count)
        title = "2,000 x 20 KB, TLS, 30 ms"
        costs = compare(title, folder, clients, server.environment(server.secure))
    mine = costs["kfp-ddp sync"].wall
    figures = {"small_vs_transfer_manager": costs["transfer manager"].wall / mine}
    if "rclone" in costs:
        figures["small_vs_rclone_default"] = costs["rclone"].wall / mine
        best = min(costs["rclone 64"].wall, costs["rclone 128"].wall)
        figures["small_vs_rclone_tuned"] = best / min(mine, costs["kfp-ddp sync 128"].wall)
    return figures


def _processor(program: Path, folder: Path) -> dict[str, float]:
    files = 10_000
    with serve(program, folder, small=files) as server:
        clients: dict[str, Callable[[Path], list[str]]] = {
            "kfp-ddp sync": lambda target: ours("small", target)
        }
        if _peers("rclone"):
            clients["rclone 16"] = partial(_rclone_small, server.plain, "16")
        title = f"{files:,} x 20 KB, plain, 0 ms"
        costs = compare(title, folder, clients, server.environment(server.plain))
    mine = costs["kfp-ddp sync"].cpu
    figures = {"cpu_us_per_small_file": mine / files * 1e6}
    if "rclone 16" in costs:
        figures["small_cpu_vs_rclone"] = costs["rclone 16"].cpu / mine
    return figures


def _s3(folder: Path) -> dict[str, float]:
    if not _peers("rclone", "s5cmd", "go"):
        return {}
    files, source = 10_000, folder / "source"
    for number in range(files):
        file = source / f"class{number // 1000:03}" / f"img_{number:07}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(number.to_bytes(4, "big") + os.urandom(16) * 1250)
    with serve_s3(folder) as environment:
        upload = ["s5cmd", "--retry-count", "20", "cp", f"{source}/", "s3://small/ds/"]
        subprocess.run(upload, env=environment, stdout=subprocess.DEVNULL, check=True)
        shutil.rmtree(source)
        store = ["--s3-env-auth", "--s3-endpoint", environment["S3_ENDPOINT_URL"]]
        copy = ["rclone", "copy", "--use-server-modtime", *store, ":s3:small/ds"]
        clients: dict[str, Callable[[Path], list[str]]] = {
            "kfp-ddp sync": lambda target: ours("s3://small/ds", target),
            "s5cmd": lambda target: ["s5cmd", "cp", "s3://small/ds/*", f"{target}/"],
            "rclone 16": lambda target: [*copy, str(target), "--transfers=16", "--checkers=16"],
            "rclone 64": lambda target: [*copy, str(target), "--transfers=64", "--checkers=64"],
        }
        costs = compare(f"{files:,} x 20 KB, S3", folder, clients, environment)
    mine = costs["kfp-ddp sync"]
    return {
        "s3_small_vs_rclone_tuned": min(costs[f"rclone {n}"].wall for n in (16, 64)) / mine.wall,
        "s3_small_vs_s5cmd": costs["s5cmd"].wall / mine.wall,
        "s3_cpu_us_per_small_file": mine.cpu / files * 1e6,
    }


def _big(program: Path, folder: Path) -> dict[str, float]:
    figures: dict[str, float] = {}
    if not _peers("rclone"):
        return figures
    with serve(program, folder, large=20) as server:
        for name, endpoint in (("big", server.plain), ("big_tls", server.secure)):
            clients: dict[str, Callable[[Path], list[str]]] = {
                "kfp-ddp sync": lambda target: ours("large", target),
                "rclone": partial(_rclone_large, endpoint),
            }
            title = f"20 x 50 MB, {endpoint.partition(':')[0]}"
            costs = compare(title, folder, clients, server.environment(endpoint))
            figures[f"{name}_vs_rclone"] = costs["rclone"].wall / costs["kfp-ddp sync"].wall
    return figures


def _unchanged(program: Path, folder: Path) -> dict[str, float]:
    if not _peers("rclone"):
        return {}
    with serve(program, folder, many=50_000) as server:
        environment = server.environment(server.plain)
        clients: dict[str, Callable[[Path], list[str]]] = {
            "kfp-ddp sync": lambda target: ours("many", target),
            "rclone": lambda target: rclone(
                server.plain, "many", target, "--transfers", "16", "--checkers", "16"
            ),
        }
        for name, command in clients.items():  # the sync after which nothing changes
            measure(command(folder / name.replace(" ", "-")), environment)
        title = "50,000 objects, unchanged"
        costs = compare(title, folder, clients, environment, fresh=False)
        for name in clients:
            shutil.rmtree(folder / name.replace(" ", "-"))
    return {"unchanged_vs_rclone": costs["rclone"].wall / costs["kfp-ddp sync"].wall}


def _million(program: Path, folder: Path) -> dict[str, float]:
    with serve(program, folder, million=1_000_000) as server:
        cost = measure(
            [sys.executable, "-c", LISTING, str(folder / "none")], server.environment(server.plain)
        )
    print(f"\n1,000,000 objects listed\n  {'kfp-ddp':28} {cost.wall:8.2f} s  {cost.memory:6.0f} MB")
    return {"million_listing_mb": cost.memory}


if __name__ == "__main__":
    for figure, value in run().items():
        print(f"{figure:28} {value:8.2f}")
