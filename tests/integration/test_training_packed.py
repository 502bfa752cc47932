"""Training, evaluation and export on the archives of a packed version."""

from pathlib import Path

import pytest
import torch

from kfp_ddp.datasets.options import Options
from kfp_ddp.datasets.sync import sync
from kfp_ddp.export.prove import real_samples
from kfp_ddp.training import checkpoint
from tests.evaluations import evaluate
from tests.training_ranks import Ranks, config, dataset, state_hash, train, train_until_killed

SMALL_BUFFER = {"shuffle_buffer_mb": 0.01}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset(tmp_path_factory.mktemp("packed") / "folders")


@pytest.fixture(scope="module")
def archives(folders: Path) -> Path:
    return sync(str(folders), folders.parent / "claim", Options(pack="tar")).path


@pytest.mark.slow
def test_archives_train_to_folders_bits(folders: Path, archives: Path, tmp_path: Path) -> None:
    """With the decoded cache and without it."""
    ended = set()
    for name, data, more in (
        ("folders", folders, {}),
        ("archives", archives, {"workers": 2}),
        ("cached", archives, {"cache_gb": 1, "cache_dir": str(tmp_path)}),
    ):
        run = config(data, tmp_path / name, epochs=1, warmup_epochs=0, **more)
        assert train(run, 2) == [0, 0]
        ended.add(state_hash(run))
    assert len(ended) == 1


@pytest.mark.slow
def test_windows_of_archives_resume_also_on_other_ranks(archives: Path, tmp_path: Path) -> None:
    whole, parts, other = (
        config(
            archives,
            tmp_path / name,
            epochs=1,
            warmup_epochs=0,
            micro_batch_size=4,
            checkpoint_steps=5,
            **SMALL_BUFFER,
        )
        for name in ("whole", "parts", "other")
    )
    assert train(whole, 2) == [0, 0]
    for run, world in ((parts, 2), (other, 1)):
        train_until_killed(run, 2, "os.replace")
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


def test_evaluation_and_proof_are_equal_for_archives_and_folders(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path, tmp_path: Path
) -> None:
    packed = sync(str(trained_dataset), tmp_path / "claim", Options(pack="tar")).path
    (packed / "_SUCCESS").write_text((trained_dataset / "_SUCCESS").read_text())
    told, samples = [], []
    _, info = checkpoint.load_model(trained_checkpoint)
    for data in (trained_dataset, packed):
        sizes = {"batch_size": 7, "worst": 8}
        record, _, document, _ = evaluate(trained_checkpoint, trained_run, data, **sizes)
        rows = (trained_run / "evaluation" / "predictions.csv").read_text().splitlines()
        predictions = [row.split(",")[:3] for row in rows]
        digests = (record.samples_digest, record.dataset_digest, record.accuracy)
        told.append((digests, predictions, document.count("data:image/webp;base64,")))
        samples.append(real_samples(data / "val", info))
    assert told[0] == told[1]
    assert torch.equal(*samples)
