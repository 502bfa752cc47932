"""What the train step hands to its workers: words that arrive as they are, and one time-out."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_ddp.core.errors import InputError
from kfp_ddp.runs.train.engine import node_command, run, with_timeout
from kfp_ddp.training.config import TrainConfig

PIECES = ("$", "$$", "(HOME)", "$(HOME)", "$$(A)", "a", "/", " ", "{", "}", "(", ")", "'", '"', "ä")


def expanded(word: str) -> str:
    """A word of a command as Kubernetes makes it where every variable is set."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda found: (found[1] and "VALUE") or "$", word)


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_kubernetes_expands_nothing_in_the_command(name: str) -> None:
    config = TrainConfig(data=f"/data/{name}", output_dir="/work/$(RUN)", run_id="$$")
    words = node_command(config)
    assert [expanded(word) for word in words[4:]] == config.to_argv()


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
def test_time_out_is_that_of_the_collectives(training: Any, job: Any, minutes: Any) -> None:
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
