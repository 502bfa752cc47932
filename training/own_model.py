"""A network of one's own: a file with `build(num_classes)` and what may stand beside it.

The file is code that runs wherever the network is built: in training, and where a checkpoint or a
bundle that holds it is loaded.
"""

import functools
import linecache
import random
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kfp_ddp.core.errors import InputError
from kfp_ddp.training import model_file
from kfp_ddp.training.config import TrainConfig

Optimizer = Callable[[nn.Module, TrainConfig], torch.optim.Optimizer]
"""`optimizer(network, config)`: its rates follow the schedule of `config`, in proportion."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""`loss(logits, targets)`: the mean over a micro-batch; targets as for F.cross_entropy."""
Transforms = Callable[[Tensor, int, random.Random], Tensor]
"""`transforms(image, size, draw)`: a training image uint8 [3, H, W] as uint8 [3, size, size].

It takes the place of `augment`. All randomness is drawn from `draw`, so that a resumed run sees
the same images.
"""


@dataclass(frozen=True)
class OwnModel:
    """What a file defines; None for what it leaves to the configuration."""

    file: str
    build: Callable[[int], nn.Module]
    optimizer: Optimizer | None
    loss: Loss | None
    transforms: Transforms | None

    def scheduled(
        self, network: nn.Module, config: TrainConfig, peak: float
    ) -> torch.optim.Optimizer:
        """The file's optimizer; its groups follow the schedule as their rates are to `peak`.

        Raises:
            InputError: the function raises, or returns none; one line.
        """
        assert self.optimizer is not None
        made: object = self._called("optimizer", self.optimizer, network, config)
        if not isinstance(made, torch.optim.Optimizer):
            raise self._returns("optimizer", made, "a torch.optim.Optimizer")
        for group in made.param_groups:
            group.setdefault("lr_scale", float(group["lr"]) / peak)
        return made

    def transformed(self, image: Tensor, size: int, draw: random.Random) -> Tensor:
        """A training image as the file's function has it.

        Raises:
            InputError: the function raises, or returns no image of that size; one line.
        """
        made: object = self._called("transforms", self.transforms, image, size, draw)
        if not isinstance(made, Tensor) or (made.dtype, made.shape) != (
            torch.uint8,
            (3, size, size),
        ):
            raise self._returns("transforms", made, f"an image uint8 [3, {size}, {size}]")
        return made

    def lost(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of a micro-batch as the file's function has it.

        Raises:
            InputError: the function raises, or returns no number to learn from; one line.
        """
        made: object = self._called("loss", self.loss, logits, targets)
        if not isinstance(made, Tensor) or made.shape != () or not made.requires_grad:
            raise self._returns("loss", made, "one number that depends on the logits")
        return made

    def _called(self, name: str, function: Any, *arguments: object) -> object:
        try:
            return function(*arguments)
        except Exception as error:
            raise InputError(f"{name} in {self.file} {raised(self.file, error)}") from error

    def _returns(self, name: str, made: object, wanted: str) -> InputError:
        what = type(made).__name__
        if isinstance(made, Tensor):
            what = f"{made.dtype} {list(made.shape)}"
        return InputError(f"{name} in {self.file} returns {what}, not {wanted}: correct the file")


def of(config: TrainConfig) -> OwnModel | None:
    """The file of the run's model; None for a network that is known by name.

    Raises:
        InputError: the file raises, or what it defines is no function; one line.
    """
    return load(config.model, config.model_code) if config.model_code else None


@functools.lru_cache(maxsize=8)
def load(model: str, code: str) -> OwnModel:
    """Run the file `code` of `model`, as a TrainConfig has them, once in a process.

    Raises:
        InputError: it raises, or what it defines is no function; one line.
    """
    file, function = model_file.split(model)
    text = model_file.unpack(code)
    # A name of its own: others find the module and its source there, as torch.compile does.
    module = types.ModuleType(f"kfp_ddp_own_{model_file.digest(code)[:12]}")
    module.__file__ = f"<{file} of {module.__name__}>"
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(True), module.__file__)
    sys.modules[module.__name__] = module
    try:
        exec(compile(text, module.__file__, "exec"), vars(module))  # noqa: S102  a user's own code
    except (Exception, SystemExit) as error:
        raise InputError(f"the model's file {raised(file, error)}") from error
    found: dict[str, Any] = {}
    for name in (function, "optimizer", "loss", "transforms"):
        value = getattr(module, name, None)
        if isinstance(value, types.ModuleType):  # as after `from torchvision import transforms`
            value = None
        if not (callable(value) or (value is None and name != function)):
            raise InputError(f"{name} in the model's file {file} is no function: rename or mend it")
        found[name] = value
    rest = (found[name] for name in ("optimizer", "loss", "transforms"))
    return OwnModel(file, found[function], *rest)


def network(model: str, code: str, num_classes: int) -> nn.Module:
    """The untrained network of a file.

    Raises:
        InputError: the file or its function raises, or returns no module; one line.
    """
    build = load(model, code).build
    try:
        built = build(num_classes)
    except (Exception, SystemExit) as error:
        raise InputError(f"{model}({num_classes}) {raised(model, error)}") from error
    if not isinstance(built, nn.Module):
        raise InputError(
            f"{model}({num_classes}) returns {type(built).__name__}, not a torch.nn.Module: "
            "return the network"
        )
    return built


def raised(file: str, error: BaseException) -> str:
    """What went wrong and in which line of the file, as the end of a line of error."""
    where, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(f"<{file.partition(':')[0]} "):
            where = f" in line {trace.tb_lineno}"
        trace = trace.tb_next
    first = (str(error).strip().splitlines() or [""])[0]
    return f"raises {type(error).__name__}{where}: {first}; correct the file"
