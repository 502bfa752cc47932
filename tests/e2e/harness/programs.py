"""Programs that tests call on this machine."""

import subprocess
import sys


def kubectl(*arguments: str, text: str = "") -> str:
    """Run kubectl, which reads `text` from `-`; return what it wrote."""
    command = ["kubectl", *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}\n{text}"
    return done.stdout


def kfp_ddp(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run our command line to its end."""
    command = [sys.executable, "-m", "kfp_ddp", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)
