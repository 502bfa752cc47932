import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import run_output
from tests.kfp_server import faults
from tests.kfp_server.server import KfpServer


def test_an_interrupted_command_ends_with_130_and_a_word(kfp_server: KfpServer) -> None:
    kfp_server.fail("*", faults.silence)
    words = ["upload", "train_resnet", "--host", kfp_server.url, "--registry", "example.com/ml"]
    with subprocess.Popen(
        [sys.executable, "-m", "kfp_ddp", *words], stderr=subprocess.PIPE, text=True
    ) as command:
        while not kfp_server.requests and command.poll() is None:
            time.sleep(0.02)
        command.send_signal(signal.SIGINT)
        _, said = command.communicate(timeout=30)
    assert (command.returncode, said.strip()) == (130, "interrupted")


@pytest.mark.parametrize("words", [["report", "{run}"], ["models", "{name}", "--destination", "."]])
def test_a_name_does_not_move_the_cursor_of_a_terminal(words: list[str], tmp_path: Path) -> None:
    name = "\x1b[2Jcleared"
    run = run_output.make(tmp_path / name)
    reader, terminal = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "kfp_ddp",
        *(word.format(run=run, name=name) for word in words),
    ]
    subprocess.run(command, stdout=terminal, stderr=terminal, cwd=tmp_path, check=False)
    os.close(terminal)
    with open(reader, "rb") as screen:
        text = screen.read1(1 << 16)
    assert b"\\x1b[2Jcleared" in text
    assert b"\x1b" not in text
