"""The loss of a training step: cross-entropy, smoothed, weighted by class, of mixed targets."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kfp_ddp.training import own_model
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.data import Index


class Loss:
    """The loss that `config` asks for on the training images of `index`.

    The function `loss` of a model's own file takes the place of cross-entropy.
    """

    def __init__(self, config: TrainConfig, index: Index, device: torch.device) -> None:
        self.smoothing = config.label_smoothing
        self.class_weights = balanced(index) if config.class_weights == "balanced" else []
        """Of each class, in their order; none where all weigh the same."""
        weights = torch.tensor(self.class_weights, device=device)
        self._weights = weights if self.class_weights else None
        own = own_model.of(config)
        self._own = own.loss if own else None
        if isinstance(self._own, nn.Module):
            self._own = self._own.to(device)  # with weights of its own

    def __call__(self, logits: Tensor, targets: Tensor, own: float = 1.0) -> Tensor:
        """The mean over a micro-batch.

        Args:
            logits: [N, classes].
            targets: Class numbers [N].
            own: Share of each image that is its own; the rest is of the one before it.
        """
        loss = self._entropy(logits, targets)
        if own == 1:
            return loss
        return own * loss + (1 - own) * self._entropy(logits, targets.roll(1))

    def _entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self._own is not None:
            return self._own(logits, targets)
        return F.cross_entropy(logits, targets, self._weights, label_smoothing=self.smoothing)


def balanced(index: Index) -> list[float]:
    """A weight for each class in inverse proportion to its images: 1 where all have as many."""
    counts = torch.bincount(torch.tensor(index.targets), minlength=len(index.classes))
    each = len(index) / (len(index.classes) * counts.clamp(min=1).double())
    return [float(weight) for weight in each]
