"""What the network makes of the validation split, each image exactly once over the ranks."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.data import Images, evaluation_keys, loader
from kfp_ddp.training.distributed import World
from kfp_ddp.training.learner import Learner
from kfp_ddp.training.model import logits
from kfp_ddp.training.prefetch import DeviceBatch, to_device
from kfp_ddp.training.prepared import Split


class Validation:
    """Measures a learner on `split`, of which this rank takes its share."""

    def __init__(self, config: TrainConfig, world: World, split: Split) -> None:
        self.config, self.world, self.split = config, world, split
        self.skipped = 0
        """Images that could not be read, over all evaluations."""

    @torch.no_grad()
    def measure(self, learner: Learner) -> dict[str, float]:
        """Loss, top-1 (accuracy) and top-5, the same on every rank."""
        network = learner.to_evaluate()
        network.eval()
        # An Apple GPU has no float64.
        exact = torch.float32 if self.world.device.type == "mps" else torch.float64
        sums = torch.zeros(3, dtype=exact, device=self.world.device)
        rounds = samples = 0
        for batch in self._batches():
            self.skipped += batch.skipped
            rounds, samples = rounds + 1, samples + len(batch.targets)
            with learner.autocast:
                output = logits(network, batch.images, self.config.test_time_flip)
            top = output.topk(min(5, output.shape[1])).indices == batch.targets[:, None]
            loss = F.cross_entropy(output.float(), batch.targets, reduction="sum")
            sums += torch.stack([loss, top[:, 0].sum(), top.sum()])
        if learner.strategy.collective_state:
            self._forward_with_the_others(network, rounds)
        learner.train()
        loss_sum, first, five, count_all = self.world.sum([*sums.tolist(), samples])
        count_all = max(count_all, 1)
        return {
            "loss": loss_sum / count_all,
            "accuracy": first / count_all,
            "top5": five / count_all,
        }

    def _batches(self) -> Iterator[DeviceBatch]:
        index, size = self.split.index, self.config.micro_batch_size
        keys = list(evaluation_keys(index, size, self.world.rank, self.world.size))
        images = Images(index, self.config, for_training=False, cache=self.split.cache)
        pin = self.world.device.type == "cuda"
        # A run's worth of start-up and no gain where decoding is done already.
        workers = 0 if self.split.cache else self.config.workers
        loaded = iter(loader(images, keys, workers, pin))
        return to_device(loaded, self.world.device)

    def _forward_with_the_others(self, network: nn.Module, rounds: int) -> None:
        """Sharded weights are gathered by all: pass as many batches as the rank with the most."""
        size = self.config.image_size
        blank = torch.zeros(1, 3, size, size, device=self.world.device)
        for _ in range(max(self.world.gather(rounds)) - rounds):
            logits(network, blank, self.config.test_time_flip)
