"""The timeout of collectives."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.runs.train.engine import with_timeout
from tests.serving import free_port

RANK = """
import json, os, sys
import torch
from torch import distributed
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.distributed import start

print("imported", flush=True)
sys.stdin.readline()
world = start(TrainConfig.create(data="/data", output_dir=sys.argv[2], **json.loads(sys.argv[1])))
group = world.control if sys.argv[3] == "control" else None
distributed.barrier(group=group)
if world.rank == 1:
    sys.stdin.read()  # it is alive and does nothing
    os._exit(0)
try:
    distributed.all_reduce(torch.ones(1), group=group)
except RuntimeError as error:
    print(error, flush=True)
    os._exit(7)
"""


@pytest.mark.slow
@pytest.mark.parametrize("group", ["data", "control"])
def test_a_collective_with_a_silent_peer_ends_after_the_timeout(tmp_path: Path, group: str) -> None:
    training: dict[str, Any] = with_timeout({"device": "cpu"}, {"nccl_timeout_minutes": 0.1})
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", RANK, json.dumps(training), str(tmp_path), group]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:  # importing torch may take a rank longer than the timeout
            assert rank.stdout is not None
            assert rank.stdout.readline() == "imported\n"
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        ranks[0].wait(timeout=300)  # torch's default is 30 minutes
        output, _ = ranks[0].communicate()
        assert ranks[0].returncode == 7
        assert "6000ms" in output
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
