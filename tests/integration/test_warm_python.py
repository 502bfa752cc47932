"""Processes forked from a warm Python behave as if they were started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kfp_ddp.local import warm

PROBE = """
import atexit, gc, os, signal, sys, time
state = os.environ.get("VALUE"), "decimal" in sys.modules, gc.isenabled()
print(sys.argv[1:], os.getcwd(), *state, flush=True)
if "wait" in sys.argv:
    print(os.getpid(), flush=True)
    if "ignores" not in sys.argv:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
    print("ready", flush=True)
    time.sleep(600)
if "dies" in sys.argv:
    os.kill(os.getpid(), int(sys.argv[2]))
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)  # its thread waits for more until Python ends
pool.submit(time.sleep, 0)
atexit.register(print, "at the end")
print("to stderr", file=sys.stderr)
if "leaves" in sys.argv:
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)
if "raises" in sys.argv:
    raise ValueError("wrong")
sys.exit(5)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forked on Linux alone")


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder with a module `probe`, which is forked, and `other`, which is not."""
    tmp_path = tmp_path_factory.mktemp("probe")
    for name in ("probe", "other"):
        (tmp_path / f"{name}.py").write_text(PROBE)
    with warm.python(("decimal",), ("probe",)):
        while not Path(sys.executable).with_name("socket").exists():
            time.sleep(0.01)
        yield tmp_path


def start(
    folder: Path, *words: str, session: bool = False, group: int | None = None
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=folder,
        env={**os.environ, "VALUE": "yes"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=session,
        process_group=group,
    )


@pytest.mark.parametrize(("module", "forked"), [("probe", True), ("other", False)])
def test_a_module_runs_as_if_it_was_started(probe: Path, module: str, forked: bool) -> None:
    process = start(probe, module, "one", "two three")
    out, err = process.communicate()
    assert out == f"['one', 'two three'] {probe} yes {forked} True\nat the end\n"
    assert err == "to stderr\n"
    assert process.returncode == 5


@pytest.mark.parametrize(
    ("words", "code", "out", "err"),
    [
        (["leaves"], 0, "at the end\n", ""),
        (["raises"], 1, "at the end\n", "ValueError: wrong\n"),
        (["dies", str(int(signal.SIGUSR2))], -signal.SIGUSR2, "", ""),
        (["dies", str(int(signal.SIGKILL))], -signal.SIGKILL, "", ""),
    ],
)
def test_a_fork_ends_as_a_process(
    probe: Path, words: list[str], code: int, out: str, err: str
) -> None:
    process = start(probe, "probe", *words)
    output, errors = process.communicate()
    assert process.returncode == code
    assert output.endswith(out)
    assert errors.endswith(err)


def waiting(process: "subprocess.Popen[str]") -> psutil.Process:
    """The forked process, once it waits."""
    assert process.stdout is not None
    _, pid, ready = (process.stdout.readline() for _ in range(3))
    assert ready == "ready\n"
    return psutil.Process(int(pid))


def test_a_signal_is_forwarded(probe: Path) -> None:
    with start(probe, "probe", "wait") as process:
        waiting(process)
        process.terminate()
    assert process.returncode == 7


@pytest.mark.parametrize("apart", [False, True])
def test_killing_the_group_kills_the_fork(probe: Path, apart: bool) -> None:
    """Also in a session of its own, as torch starts ranks."""
    group = None if apart else 0
    with start(probe, "probe", "wait", "ignores", session=apart, group=group) as process:
        worker = waiting(process)
        os.killpg(process.pid, signal.SIGKILL)
        worker.wait(timeout=60)
    assert process.returncode == -signal.SIGKILL


def test_the_fork_ends_with_the_process_that_started_it(probe: Path) -> None:
    program = "import subprocess, sys; subprocess.Popen(sys.argv[1:]); input()"
    command = [sys.executable, "-m", "probe", "wait"]
    with subprocess.Popen(
        [sys.executable, "-c", program, *command],
        cwd=probe,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as starter:
        worker = waiting(starter)
        starter.kill()
        worker.wait(timeout=60)


def test_nothing_remains_after_the_block(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    cold = sys.executable
    with warm.python((), ("probe",)):
        while not Path(sys.executable).with_name("socket").exists():
            time.sleep(0.01)
        folder = Path(sys.executable).parent
        with start(tmp_path, "probe", "wait") as process:
            waiting(process)
            process.terminate()
    assert process.returncode == 7
    assert sys.executable == cold
    assert not folder.exists()


def test_a_server_that_still_imports_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    program = "from kfp_ddp.local import warm\nwith warm.python(('slow',)): pass"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, cwd=tmp_path, timeout=60, check=True).returncode == 0


def test_the_server_ends_with_its_owner() -> None:
    program = "from kfp_ddp.local import warm\nwith warm.python(()): print(1); input()"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        servers = psutil.Process(owner.pid).children()
        assert len(servers) == 1
        owner.kill()
    assert psutil.wait_procs(servers, timeout=60)[1] == []
