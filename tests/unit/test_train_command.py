"""What the train step hands to its workers: words that arrive as they are, and one time-out."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.runs.train.engine import node_command, run, with_timeout
from kfp_ddp.training.config import TrainConfig

PIECES = ("$", "$$", "(HOME)", "$(HOME)", "$$(A)", "a", "/", " ", "{", "}", "(", ")", "'", '"', "ä")


def expanded(word: str) -> str:
    """A word of a command as Kubernetes makes it where every variable is set."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda found: (found[1] and "VALUE") or "$", word)


def test_what_kubernetes_would_expand_arrives_as_it_was() -> None:
    chance = random.Random(7)
    for _ in range(2000):
        name = "/data/" + "".join(chance.choices(PIECES, k=chance.randrange(1, 9)))
        config = TrainConfig(data=name, output_dir="/work/$(RUN)", run_id="$$")
        words = node_command(config)
        assert [expanded(word) for word in words[4:]] == config.to_argv(), name


@pytest.mark.parametrize(
    ("training", "job", "minutes"),
    [
        ({}, {}, None),
        ({"timeout_minutes": 5}, {}, 5),
        ({}, {"nccl_timeout_minutes": 30}, 30),
        ({"timeout_minutes": 30}, {"nccl_timeout_minutes": 30.0}, 30),
        ({"timeout_minutes": 5}, {"nccl_timeout_minutes": 0}, 5),
    ],
)
def test_the_jobs_time_out_is_that_of_the_collectives(
    training: Any, job: Any, minutes: Any
) -> None:
    assert with_timeout(training, job).get("timeout_minutes") == minutes


@pytest.mark.parametrize("job", [{"elastic": "1:2"}, {"restart_policy": "OnFailure"}])
def test_pods_that_come_while_others_go_on_need_a_claim(job: Any, tmp_path: Path) -> None:
    """Each would begin with the checkpoint that lay in the bucket when it came, or with none."""
    (name,) = job
    with pytest.raises(SystemExit, match=f"^error: job sets {name}=.* work in a bucket"):
        run(
            run_id="run-1",
            task_name="train",
            task_id="",
            dataset_path="/data",
            training={},
            backend="pytorchjob",
            job=job,
            image="image",
            work_dir=(tmp_path / "bucket").as_uri(),
            trained_model=None,
            train_metrics=None,
            loss_curve=None,
            training_job=None,
            task_config=None,
        )
    assert not list(tmp_path.iterdir())


def test_two_time_outs_are_one_line() -> None:
    with pytest.raises(InputError, match="which are one time-out: give one of them"):
        with_timeout({"timeout_minutes": 5}, {"nccl_timeout_minutes": 10})
