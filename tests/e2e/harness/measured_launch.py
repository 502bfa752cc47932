"""A launch in a process of its own that tells in its last line what it used."""

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

MARK = "USED "
LOOK_SECONDS = 0.25
WINDOW = 20
"""Looks over which the busiest time is found: 5 s."""


@dataclass
class Used:
    """What a launch used from its first request on, in seconds, MB, and numbers."""

    seconds: float = 0
    cpu_share: float = 0
    """Of one core, over all of it."""
    busiest_share: float = 0
    """Of one core, in its busiest 5 s after the first."""
    rss_mb: float = 0
    sockets: int = 0
    """The most that were open at once."""
    connections: int = 0
    """Those that were opened."""
    requests: int = 0
    threads: int = 0
    by_request: dict[str, int] = field(default_factory=dict)


class Launch:
    """A launch that was begun; `wait` for it."""

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
        """When each line came, in seconds since 1970."""
        self.used = Used()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.output:
            if line.startswith(MARK):
                self.used = Used(**json.loads(line.removeprefix(MARK)))
                continue
            self.times.append(time.time())
            self.lines.append(line.rstrip("\n"))

    def wait(self, seconds: float) -> int:
        """The exit code; raises TimeoutExpired where it goes on after so long."""
        code = self.process.wait(seconds)
        self.reader.join()
        self.output.close()
        return code

    def stop(self) -> None:
        """End it, if it has not ended."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)


class Meter(logging.Handler):
    """Counts requests by what urllib3 tells of them, and looks now and then at this process."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self.connections = self.sockets = self.threads = 0
        self.began, self.cpu_began = time.monotonic(), time.process_time()
        self.cpu = [self.cpu_began]
        pool = logging.getLogger("urllib3.connectionpool")
        pool.setLevel(logging.DEBUG)
        pool.propagate = False
        pool.addHandler(self)
        threading.Thread(target=self._look, daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("Starting new"):
            self.connections += 1
        elif isinstance(record.args, tuple) and len(record.args) > 6:
            method, path = record.args[3:5]
            self.asked[f"{method} {'/'.join(str(path).split('?')[0].split('/')[:6])}"] += 1

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            self.cpu.append(time.process_time())
            self.threads = max(self.threads, threading.active_count())
            self.sockets = max(self.sockets, _sockets())

    def used(self) -> Used:
        """What was used so far."""
        seconds = time.monotonic() - self.began
        windows = zip(self.cpu[WINDOW:], self.cpu[2 * WINDOW :], strict=False)
        return Used(
            seconds=seconds,
            cpu_share=(time.process_time() - self.cpu_began) / seconds,
            busiest_share=max((b - a for a, b in windows), default=0) / (WINDOW * LOOK_SECONDS),
            rss_mb=_peak_memory_mb(),
            sockets=self.sockets,
            connections=self.connections,
            requests=self.asked.total(),
            threads=self.threads,
            by_request=dict(self.asked),
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
    """Launch, and tell what it used however it ends."""
    from kfp_ddp.core.errors import KfpDdpError
    from kfp_ddp.jobs.launch_spec import LaunchSpec
    from kfp_ddp.jobs.run import launch
    from kfp_ddp.k8s.api import Api

    meter, code = Meter(), 0
    try:
        done = launch(
            LaunchSpec.create(**spec), run_id, "train", "", Api.connect(namespace), Path(run_dir)
        )
        print("DONE", done.job["metadata"]["name"], flush=True)
    except KfpDdpError as error:
        print(f"error: {error}", flush=True)
        code = error.exit_code
    print(MARK + json.dumps(meter.used().__dict__), flush=True)
    os._exit(code)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
