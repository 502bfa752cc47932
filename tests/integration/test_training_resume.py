"""Interrupted at any instant and resumed, a run ends with the bits of an uninterrupted one."""

import random
import signal
import time
from pathlib import Path

import pytest
import torch

from kfp_ddp.training import checkpoint
from tests.training_ranks import (
    Ranks,
    config,
    dataset,
    newest,
    state_hash,
    train,
    train_until_killed,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset(tmp_path_factory.mktemp("resume") / "data")


@pytest.fixture(scope="module")
def uninterrupted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    run = config(data, tmp_path_factory.mktemp("resume") / "whole", checkpoint_steps=3)
    assert train(run, 2) == [0, 0]
    return state_hash(run)


def _interrupt_and_resume(data: Path, output: Path, number: int) -> str:
    """Kill one rank or all by a signal of chance, up to three times, then let the run end."""
    draw = random.Random(number)
    run = config(data, output, checkpoint_steps=3, log_steps=1)
    for _ in range(draw.randint(1, 3)):
        ranks = Ranks(run, 2)
        if draw.random() < 0.8:  # the others while they start
            ranks.wait_for_steps(draw.randint(1, 5))
        time.sleep(draw.uniform(0.0, 0.01))
        how = draw.choice((signal.SIGTERM, signal.SIGKILL))
        victims = draw.choice(((0,), (1,), (0, 1)))
        for victim in victims:
            ranks.kill(victim, how)
        codes = ranks.wait()
        if not any(codes):  # the run had ended
            return state_hash(run)
        assert all(codes[victim] for victim in victims), ranks.output()
        if how == signal.SIGTERM:
            # Before the handler is in place a rank dies of the signal, and its peer of the loss.
            assert set(codes) <= {0, 143, -signal.SIGTERM, 1}, ranks.output()
    assert train(run, 2) == [0, 0]
    return state_hash(run)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_killed_at_any_instant(number: int, data: Path, uninterrupted: str, tmp_path: Path) -> None:
    assert _interrupt_and_resume(data, tmp_path / "run", number) == uninterrupted


@pytest.mark.soak
@pytest.mark.parametrize("number", range(100, 200))
def test_killed_in_the_soak(number: int, data: Path, uninterrupted: str, tmp_path: Path) -> None:
    assert _interrupt_and_resume(data, tmp_path / "run", number) == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("point", ["torch.save", "os.fsync", "os.replace"])
def test_killed_inside_a_save(point: str, data: Path, uninterrupted: str, tmp_path: Path) -> None:
    run = config(data, tmp_path / "run", checkpoint_steps=3)
    train_until_killed(run, 2, point)
    last = newest(tmp_path / "run")
    assert last.step == 3
    assert train(run, 2) == [0, 0]
    assert state_hash(run) == uninterrupted


@pytest.mark.slow
def test_other_world_sizes_see_the_same_batches(data: Path, tmp_path: Path) -> None:
    """2 ranks, then 1, then 4: the weights differ by the order of float sums only."""
    whole = config(data, tmp_path / "whole", micro_batch_size=2, epochs=2, checkpoint_steps=4)
    assert train(whole, 2) == [0, 0]
    parts = config(data, tmp_path / "parts", micro_batch_size=2, epochs=2, checkpoint_steps=4)
    for world in (2, 1):
        train_until_killed(parts, world, "torch.save")
    assert train(parts, 4) == [0, 0, 0, 0]
    one, other = (
        checkpoint.load_model(tmp_path / name / "checkpoints" / "step-00000024")[0]
        for name in ("whole", "parts")
    )
    for (name, mine), theirs in zip(
        one.state_dict().items(), other.state_dict().values(), strict=True
    ):
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(mine, theirs, rtol=5e-3, atol=2e-3, msg=name)
