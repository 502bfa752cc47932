"""Steps forked from a process that has imported what they need: as if started for themselves."""

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
told = os.environ.get("TOLD"), "decimal" in sys.modules, gc.isenabled()
print(sys.argv[1:], os.getcwd(), *told, flush=True)
if "wait" in sys.argv:
    print(os.getpid(), flush=True)
    if "deaf" not in sys.argv:
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
    raise ValueError("as told")
sys.exit(5)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forked on Linux alone")


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a module `probe`, which a server takes; others it does not."""
    tmp_path = tmp_path_factory.mktemp("probe")
    for name in ("probe", "other"):
        (tmp_path / f"{name}.py").write_text(PROBE)
    with warm.python((warm.Stage(("waiting",), ()), warm.Stage(("probe",), ("decimal",)))):
        while not Path(sys.executable).with_name("probe").exists():
            time.sleep(0.01)
        yield tmp_path


def start(
    folder: Path, *words: str, session: bool = False, group: int | None = None
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=folder,
        env={**os.environ, "TOLD": "so"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=session,
        process_group=group,
    )


@pytest.mark.parametrize(("module", "forked"), [("probe", True), ("other", False)])
def test_it_runs_as_if_started_for_itself(probe: Path, module: str, forked: bool) -> None:
    process = start(probe, module, "one", "two three")
    said, erred = process.communicate()
    assert said == f"['one', 'two three'] {probe} so {forked} True\nat the end\n"
    assert erred == "to stderr\n"
    assert process.returncode == 5


def test_it_may_leave_by_itself(probe: Path) -> None:
    """As ranks do."""
    process = start(probe, "probe", "leaves")
    said, _ = process.communicate()
    assert said.endswith("at the end\n")
    assert process.returncode == 0


def test_an_exception_is_told(probe: Path) -> None:
    process = start(probe, "probe", "raises")
    _, erred = process.communicate()
    assert erred.splitlines()[-1] == "ValueError: as told"
    assert process.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGKILL])
def test_it_ends_by_the_signal_that_ended_the_fork(probe: Path, number: signal.Signals) -> None:
    process = start(probe, "probe", "dies", str(int(number)))
    process.communicate()
    assert process.returncode == -number


def waiting(process: "subprocess.Popen[str]") -> psutil.Process:
    """The forked process, once it waits."""
    assert process.stdout is not None
    _, pid, ready = (process.stdout.readline() for _ in range(3))
    assert ready == "ready\n"
    return psutil.Process(int(pid))


def test_a_signal_is_passed_on(probe: Path) -> None:
    with start(probe, "probe", "wait") as process:
        waiting(process)
        process.terminate()
    assert process.returncode == 7


@pytest.mark.parametrize("apart", [False, True])
def test_a_kill_of_the_group_takes_the_fork_along(probe: Path, apart: bool) -> None:
    """Also of one that leads a session, as torch starts ranks."""
    group = None if apart else 0
    with start(probe, "probe", "wait", "deaf", session=apart, group=group) as process:
        worker = waiting(process)
        os.killpg(process.pid, signal.SIGKILL)
        worker.wait(timeout=60)
    assert process.returncode == -signal.SIGKILL


def test_who_started_it_may_go(probe: Path) -> None:
    """Its fork is told, as a process that watches its parent would notice."""
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


def test_nothing_is_left_when_it_is_over(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    cold = sys.executable
    with warm.python((warm.Stage(("probe",), ("decimal",)),)):
        while not Path(sys.executable).with_name("probe").exists():
            time.sleep(0.01)
        folder, process = Path(sys.executable).parent, start(tmp_path, "probe", "wait")
        worker = waiting(process)
    assert sys.executable == cold
    assert not worker.is_running()
    assert not folder.exists()
    process.communicate()
    assert process.returncode == 7


def test_nobody_waits_for_what_is_still_imported(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    program = (
        "from kfp_ddp.local import warm\n"
        "with warm.python((warm.Stage(('fast',), ()), warm.Stage(('probe',), ('slow',)))): pass"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, cwd=tmp_path, timeout=60, check=True).returncode == 0


def test_nothing_is_left_of_one_who_was_killed(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom kfp_ddp.local import warm\n"
        "with warm.python((warm.Stage(('probe',), ()),)): print(sys.executable); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline()).parent
        servers = psutil.Process(owner.pid).children()
        assert folder.is_dir()
        assert len(servers) == 1
        owner.kill()
    psutil.wait_procs(servers, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_only_what_a_pipeline_needs_stands_by(tmp_path: Path) -> None:
    compiled = tmp_path / "pipeline.yaml"
    compiled.write_text("components:\n  comp-data-sync:\n    executorLabel: exec-data-sync\n")
    assert warm.stages_of(compiled) == warm.STAGES[:1]
    compiled.write_text("components:\n  comp-train:\n    executorLabel: exec-train\n")
    assert warm.stages_of(compiled) == warm.STAGES[:2]
    compiled.write_text("components:\n  comp-mine:\n    executorLabel: exec-mine\n")
    assert warm.stages_of(compiled) == ()
