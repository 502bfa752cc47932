"""Training, evaluation and export on the archives of a packed version."""

from pathlib import Path

import pytest
import torch

from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.sync import sync
from kfp_ddp.export.prove import real_samples
from kfp_ddp.training.state import checkpoint
from tests.evaluations import Trained
from tests.training_ranks import config, dataset, output_of, state_hash, train_until_killed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset(tmp_path_factory.mktemp("packed") / "folders")


@pytest.fixture(scope="module")
def archives(folders: Path) -> Path:
    return sync(str(folders), folders.parent / "claim", SyncOptions(pack="tar")).path


@pytest.mark.slow
def test_archives_train_to_folders_bits(folders: Path, archives: Path, tmp_path: Path) -> None:
    ended = set()
    for data, workers in ((folders, 0), (archives, 2)):
        run = config(data, tmp_path / str(workers), epochs=1, warmup_epochs=0, workers=workers)
        output_of(run, 2)
        ended.add(state_hash(run))
    assert len(ended) == 1


@pytest.mark.slow
def test_windows_of_archives_resume(archives: Path, tmp_path: Path) -> None:
    fields = {"epochs": 1, "warmup_epochs": 0, "micro_batch_size": 4, "checkpoint_steps": 5}
    whole, parts = (
        config(archives, tmp_path / name, **fields, shuffle_buffer_mb=0.01)
        for name in ("whole", "parts")
    )
    output_of(whole, 2)
    train_until_killed(parts, 2, "os.replace")
    output_of(parts, 2)
    assert state_hash(parts) == state_hash(whole)
    unlike = output_of(whole.model_copy(update={"shuffle_buffer_mb": 0.02}), 1, code=2)
    assert "shuffle_buffer_mb was 0.01 and is now 0.02" in unlike


def test_archives_are_evaluated_as_folders(trained: Trained, tmp_path: Path) -> None:
    packed = sync(str(trained.dataset), tmp_path / "claim", SyncOptions(pack="tar")).path
    (packed / "_SUCCESS").write_text((trained.dataset / "_SUCCESS").read_text())
    results, samples = [], []
    _, info = checkpoint.load_model(trained.checkpoint)
    for data in (trained.dataset, packed):
        record, _, document, _ = trained._replace(dataset=data).evaluate(batch_size=7, worst=8)
        rows = trained.evaluation.with_name("predictions.csv").read_text().splitlines()
        predictions = [row.split(",")[:3] for row in rows]
        digests = (record.samples_digest, record.dataset_digest, record.accuracy)
        results.append((digests, predictions, document.count("data:image/webp;base64,")))
        samples.append(real_samples(data / "val", info))
    assert results[0] == results[1]
    assert torch.equal(*samples)
