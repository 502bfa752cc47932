"""The ports that ranks really listen on, next to the policy of deploy/network."""

import signal
from pathlib import Path

import psutil
import yaml

from tests.training_ranks import Ranks, config, dataset

POLICY = Path(__file__).parents[2] / "deploy" / "network" / "jobs.yaml"


def test_ranks_listen_on_ports_that_the_policy_allows(tmp_path: Path) -> None:
    (rule,) = yaml.safe_load(POLICY.read_text())["spec"]["ingress"]
    allowed = [range(one["port"], one.get("endPort", one["port"]) + 1) for one in rule["ports"]]
    settings = {"epochs": 10_000, "warmup_epochs": 0, "log_steps": 1}
    ranks = Ranks(config(dataset(tmp_path / "data"), tmp_path / "run", **settings), 2)
    try:
        ranks.wait_for("step 1")
        listening = {
            connection.laddr.port
            for rank in ranks.processes
            for process in (psutil.Process(rank.pid), *psutil.Process(rank.pid).children())
            for connection in process.connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
    finally:
        for rank in range(2):
            ranks.kill(rank, signal.SIGTERM)
        ranks.wait()
    assert ranks.port in listening, "the rendezvous, whose port an operator sets"
    listening.remove(ranks.port)
    assert listening
    assert not [port for port in listening if not any(port in ports for ports in allowed)]
