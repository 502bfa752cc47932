"""Training, evaluation and export on the archives of a packed version."""

import signal
from pathlib import Path

import pytest
import torch

from kfp_ddp.components.data_sync.options import Options
from kfp_ddp.components.data_sync.sync import sync
from kfp_ddp.training import checkpoint
from tests.training_ranks import Ranks, config, dataset, state_hash, train

SMALL_BUFFER = {"shuffle_buffer_mb": 0.01}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset(tmp_path_factory.mktemp("packed") / "folders")


@pytest.fixture(scope="module")
def archives(folders: Path) -> Path:
    return sync(str(folders), folders.parent / "claim", Options(pack="tar")).path


def test_archives_of_less_than_the_buffer_train_to_the_bits_of_folders(
    folders: Path, archives: Path, tmp_path: Path
) -> None:
    """With the decoded cache and without it."""
    ended = set()
    for name, data, more in (
        ("folders", folders, {}),
        ("archives", archives, {"workers": 2}),
        ("cached", archives, {"cache_gb": 1, "cache_dir": str(tmp_path)}),
    ):
        run = config(data, tmp_path / name, epochs=1, **more)
        assert train(run, 2) == [0, 0]
        ended.add(state_hash(run))
    assert len(ended) == 1


def test_a_run_on_windows_of_archives_goes_on_exactly_and_on_other_ranks(
    archives: Path, tmp_path: Path
) -> None:
    whole, parts, other = (
        config(
            archives,
            tmp_path / name,
            epochs=1,
            micro_batch_size=4,
            checkpoint_steps=5,
            **SMALL_BUFFER,
        )
        for name in ("whole", "parts", "other")
    )
    assert train(whole, 2) == [0, 0]
    for run, world in ((parts, 2), (other, 1)):
        assert train(run, 2, die_at="os.replace")[0] == -signal.SIGKILL
        assert train(run, world) == [0] * world
    assert state_hash(parts) == state_hash(whole)
    nets = [
        checkpoint.load_model(Path(run.output_dir) / "checkpoints" / "step-00000012")[0]
        for run in (whole, other)
    ]
    torch.testing.assert_close(
        *(network.state_dict()["fc.weight"] for network in nets), rtol=5e-3, atol=2e-3
    )
    unlike = Ranks(whole.model_copy(update={"shuffle_buffer_mb": 0.02}), 1)
    assert unlike.wait() == [2]
    assert "shuffle_buffer_mb was 0.01 and is now 0.02" in unlike.output()
