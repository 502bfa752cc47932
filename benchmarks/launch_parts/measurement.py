"""A launch in a separate process, whose last line is its use of resources."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "USAGE "
SAMPLE_SECONDS = 0.25
WINDOW = 20
"""Samples in the window of the busiest time: 5 s."""


@dataclass
class Usage:
    """Resources that a launch used since its first request."""

    seconds: float = 0
    cpu_share: float = 0
    """Part of one core, over the whole launch."""
    busiest_share: float = 0
    """Part of one core, in the busiest 5 s after the first 5 s."""
    rss_mb: float = 0
    sockets: int = 0
    """Largest number of open sockets."""
    connections: int = 0
    """Number of opened connections."""
    requests: int = 0
    threads: int = 0
    by_request: dict[str, int] = field(default_factory=dict)


class Launch:
    """A running launch."""

    def __init__(self, spec: dict[str, Any], run_id: str, namespace: str, run_dir: Path) -> None:
        fields = {"spec": spec, "run_id": run_id, "namespace": namespace, "run_dir": str(run_dir)}
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", __name__, json.dumps(fields)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        self.lines: list[str] = []
        self.times: list[float] = []
        """When the lines arrived, in seconds since 1970."""
        self.usage = Usage()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.output:
            if line.startswith(MARK):
                self.usage = Usage(**json.loads(line.removeprefix(MARK)))
                continue
            self.times.append(time.time())
            self.lines.append(line.rstrip("\n"))

    def wait(self, seconds: float) -> int:
        """Return the exit code. Raise TimeoutExpired if the launch runs longer."""
        code = self.process.wait(seconds)
        self.reader.join()
        self.output.close()
        return code

    def stop(self) -> None:
        """Terminate the launch if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)


class Meter(logging.Handler):
    """Count requests by the log messages of urllib3, and sample the usage of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()
        self.connections = self.sockets = self.threads = 0
        self.start, self.cpu_start = time.monotonic(), time.process_time()
        self.cpu = [self.cpu_start]
        pool = logging.getLogger("urllib3.connectionpool")
        pool.setLevel(logging.DEBUG)
        pool.propagate = False
        pool.addHandler(self)
        threading.Thread(target=self._sample, daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Count a connection or a request."""
        if record.msg.startswith("Starting new"):
            self.connections += 1
        elif isinstance(record.args, tuple) and len(record.args) > 6:
            method, path = record.args[3:5]
            self.requests[f"{method} {'/'.join(str(path).split('?')[0].split('/')[:6])}"] += 1

    def _sample(self) -> None:
        while True:
            time.sleep(SAMPLE_SECONDS)
            self.cpu.append(time.process_time())
            self.threads = max(self.threads, threading.active_count())
            self.sockets = max(self.sockets, _sockets())

    def usage(self) -> Usage:
        """Return the usage since the start."""
        seconds = time.monotonic() - self.start
        windows = zip(self.cpu[WINDOW:], self.cpu[2 * WINDOW :], strict=False)
        return Usage(
            seconds=seconds,
            cpu_share=(time.process_time() - self.cpu_start) / seconds,
            busiest_share=max((b - a for a, b in windows), default=0) / (WINDOW * SAMPLE_SECONDS),
            rss_mb=_peak_memory_mb(),
            sockets=self.sockets,
            connections=self.connections,
            requests=self.requests.total(),
            threads=self.threads,
            by_request=dict(self.requests),
        )


def _peak_memory_mb() -> float:
    """Return the peak of this program alone; ru_maxrss includes the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def _sockets() -> int:
    result = 0
    for item in os.listdir("/proc/self/fd"):
        try:
            result += os.readlink(f"/proc/self/fd/{item}").startswith("socket:")
        except OSError:
            continue
    return result


def main(spec: dict[str, Any], run_id: str, namespace: str, run_dir: str) -> None:
    """Launch, and print the usage also after an error."""
    from kfp_ddp.core.errors import KfpDdpError
    from kfp_ddp.jobs.launch_spec import LaunchSpec
    from kfp_ddp.jobs.run import launch
    from kfp_ddp.k8s.api import Api

    meter, code = Meter(), 0
    try:
        result = launch(
            LaunchSpec.create(**spec), run_id, "train", "", Api.connect(namespace), Path(run_dir)
        )
        print("DONE", result.job["metadata"]["name"], flush=True)
    except KfpDdpError as error:
        print(f"error: {error}", flush=True)
        code = error.exit_code
    print(MARK + json.dumps(meter.usage().__dict__), flush=True)
    os._exit(code)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
