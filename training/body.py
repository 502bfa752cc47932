"""What of a network is below its classifier, and its rest while only the classifier learns."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from kfp_ddp.training import optim


class Body:
    """The weights below the classifier of `network`, which begins to learn with all of them."""

    def __init__(self, network: nn.Module) -> None:
        self.frozen = False
        self._weights = [weight for weight in optim.body_of(network) if weight.requires_grad]
        self._norms = [m for m in network.modules() if isinstance(m, _BatchNorm)]

    def freeze(self, frozen: bool) -> None:
        """Let the weights learn or not; gradients that are there are gone."""
        self.frozen = frozen
        for weight in self._weights:
            weight.requires_grad_(not frozen)
            weight.grad = None
        for norm in self._norms:
            norm.train(not frozen)

    def rest(self) -> None:
        """Keep the statistics of BatchNorms in a network that was put into training mode."""
        if self.frozen:
            self.freeze(True)
