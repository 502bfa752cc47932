"""What is made of the end of a log, with reports as torchrun of torch 2.15 wrote them."""

from kfp_ddp.jobs.failure import LogError, error_in_log

REPORT = """\
E1121 14:53:53.818000 1 site-packages/torch/distributed/elastic/multiprocessing/api.py:1002] \
failed (exitcode: {code}) local_rank: 0 (pid: 8) of binary: /usr/bin/python3
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
script.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_14:53:53
  host      : node
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 8)
  error_file: <N/A>
  traceback : {told}
============================================================
"""
SEE = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


def words(before: str, told: str = SEE, code: int = 1) -> LogError:
    return error_in_log((before + REPORT.format(told=told, code=code)).splitlines())


def test_the_exception_of_the_rank_that_torchrun_names() -> None:
    log = """\
[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "script.py", line 9, in <module>
[rank0]:   File "script.py", line 10, in <module>
[rank1]: ValueError: no such layer
[rank1]: which has a second line
[rank0]: RuntimeError: Connection closed by peer [10.244.0.53]:62375.
"""
    assert words(log) == LogError("ValueError: no such layer", 1)


def test_a_rank_that_joined_no_group_has_no_prefix() -> None:
    log = "epoch 1\nTraceback (most recent call last):\n  File x\nKeyError: 'x'\n"
    assert words(log) == LogError("KeyError: 'x'", 1)


def test_the_last_of_a_chain_of_exceptions() -> None:
    log = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File x
[rank1]: KeyError: 'x'

[rank1]: During handling of the above exception, another exception occurred:

[rank1]: Traceback (most recent call last):
[rank1]:   File y
[rank1]: ValueError: no such layer
"""
    assert words(log) == LogError("ValueError: no such layer", 1)


def test_a_signal() -> None:
    told = "Signal 11 (SIGSEGV) received by PID 8"
    assert words("epoch 1\n", told, -11) == LogError(told, 1)


def test_a_recorded_traceback() -> None:
    told = 'Traceback (most recent call last):\n    File "x", line 1, in main\n  KeyError: 1\n'
    assert words("epoch 1\n", told) == LogError("KeyError: 1", 1)


def test_a_program_that_only_prints_before_it_leaves() -> None:
    assert words("cannot read /data\n", code=3) == LogError("cannot read /data", 1)
    assert words("", code=3) == LogError("exit code 3", 1)


def test_another_program_s_last_line_that_is_no_rule() -> None:
    assert error_in_log(["ValueError: x", "", "====="]) == LogError("ValueError: x")
    assert error_in_log([]) == LogError("")


MPIRUN = """\
epoch 1
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    raise ValueError("no such layer")
ValueError: no such layer
--------------------------------------------------------------------------
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
--------------------------------------------------------------------------
--------------------------------------------------------------------------
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[10415,1],1]
  Exit code:    1
--------------------------------------------------------------------------
"""


def test_mpirun_names_a_rank_that_raised_one_that_was_killed_and_a_lost_node() -> None:
    """As Open MPI 4.1 wrote them."""
    assert error_in_log(MPIRUN.splitlines()) == LogError("ValueError: no such layer", 1)
    killed = "mpirun noticed that process rank 3 with PID 0 on node a exited on signal 9 (Killed)."
    assert error_in_log(["epoch 1", "-" * 74, killed, "-" * 74]) == LogError("signal 9 (Killed)", 3)
    lost = ["ORTE has lost communication with a remote daemon.", "", "  HNP daemon: x", "the job."]
    assert error_in_log(lost) == LogError(lost[0])


def test_mpirun_of_a_program_without_a_traceback() -> None:
    line = ["bad flag --x", *MPIRUN.splitlines()[5:]]
    assert error_in_log(line) == LogError("bad flag --x", 1)
