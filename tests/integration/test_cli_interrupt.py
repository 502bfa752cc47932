import signal
import subprocess
import sys
import time

from tests.kfp_server import faults
from tests.kfp_server.server import KfpServer


def test_an_interrupted_command_ends_with_130_and_a_word(kfp_server: KfpServer) -> None:
    kfp_server.fail("*", faults.silence)
    words = ["upload", "train_resnet", "--host", kfp_server.url]
    with subprocess.Popen(
        [sys.executable, "-m", "kfp_ddp", *words], stderr=subprocess.PIPE, text=True
    ) as command:
        while not kfp_server.requests and command.poll() is None:
            time.sleep(0.02)
        command.send_signal(signal.SIGINT)
        _, said = command.communicate(timeout=30)
    assert (command.returncode, said.strip()) == (130, "interrupted")
