"""A user's own network: a file with `build(num_classes)`, run wherever the network is built."""

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
from kfp_ddp.core.failure import full_memory
from kfp_ddp.core.packed import unpack
from kfp_ddp.training.spec import model_file
from kfp_ddp.training.spec.config import TrainConfig

Optimizer = Callable[[nn.Module, TrainConfig], torch.optim.Optimizer]
"""`optimizer(network, config)`: its rates follow the schedule of `config`, in proportion."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""`loss(logits, targets)`: the mean over a micro-batch; targets as for F.cross_entropy."""
Transforms = Callable[[Tensor, int, random.Random], Tensor]
"""`transforms(image, size, draw)`: uint8 [3, H, W] to uint8 [3, size, size], in place of `augment`;
all random numbers come from `draw`, so that a resumed run sees the same images."""


@dataclass(frozen=True)
class OwnModel:
    """The functions of a file; None for those that it does not define."""

    file: str
    build: Callable[[int], nn.Module]
    optimizer: Optimizer | None
    loss: Loss | None
    transforms: Transforms | None

    def create_optimizer(
        self, network: nn.Module, config: TrainConfig, peak: float
    ) -> torch.optim.Optimizer:
        """Create the file's optimizer; its groups follow the schedule in proportion to `peak`."""
        assert self.optimizer is not None
        optimizer: object = self._call("optimizer", self.optimizer, network, config)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise self._type_error("optimizer", optimizer, "a torch.optim.Optimizer")
        for group in optimizer.param_groups:
            group.setdefault("lr_scale", float(group["lr"]) / peak)
        return optimizer

    def apply_transforms(self, image: Tensor, size: int, draw: random.Random) -> Tensor:
        """Transform a training image by the file's function; raise InputError."""
        transformed: object = self._call("transforms", self.transforms, image, size, draw)
        if not isinstance(transformed, Tensor) or (transformed.dtype, transformed.shape) != (
            torch.uint8,
            (3, size, size),
        ):
            raise self._type_error("transforms", transformed, f"an image uint8 [3, {size}, {size}]")
        return transformed

    def compute_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss of a micro-batch by the file's function; raise InputError."""
        loss: object = self._call("loss", self.loss, logits, targets)
        expected = "one number that depends on the logits"
        if not isinstance(loss, Tensor):
            raise self._type_error("loss", loss, expected)
        if loss.shape != () or not loss.requires_grad:
            raise self._type_error("loss", loss, expected)
        return loss

    def _call(self, name: str, function: Any, *arguments: object) -> object:
        try:
            return function(*arguments)
        except Exception as error:
            if full_memory(error):
                raise  # no fault of the file
            raise InputError(f"{name} in {self.file} {describe_error(self.file, error)}") from error

    def _type_error(self, name: str, result: object, expected: str) -> InputError:
        what = type(result).__name__
        if isinstance(result, Tensor):
            what = f"{result.dtype} {list(result.shape)}"
        return InputError(f"{name} in {self.file} returns {what}, not {expected}: correct the file")


def load_for(config: TrainConfig) -> OwnModel | None:
    """Load the file of the run's model; None for a network that is known by name."""
    return load(config.model, config.model_code) if config.model_code else None


@functools.lru_cache(maxsize=8)
def load(model: str, code: str) -> OwnModel:
    """Run the file `code` of `model` once in a process; raise InputError if it fails."""
    file, function = model_file.split(model)
    text = unpack(code, "model_code").decode()
    # A unique name under which others, such as torch.compile, find the module and its source.
    module = types.ModuleType(f"kfp_ddp_own_{model_file.digest(code)[:12]}")
    module.__file__ = f"<{file} of {module.__name__}>"
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(True), module.__file__)
    sys.modules[module.__name__] = module
    try:
        exec(compile(text, module.__file__, "exec"), vars(module))  # noqa: S102  a user's own code
    except (Exception, SystemExit) as error:
        raise InputError(f"the model's file {describe_error(file, error)}") from error
    functions: dict[str, Any] = {}
    for name in (function, "optimizer", "loss", "transforms"):
        value = getattr(module, name, None)
        if isinstance(value, types.ModuleType):  # as after `from torchvision import transforms`
            value = None
        is_absent = value is None and name != function
        if not callable(value) and not is_absent:
            raise InputError(f"{name} in the model's file {file} is not a function: rename it")
        functions[name] = value
    rest = (functions[name] for name in ("optimizer", "loss", "transforms"))
    return OwnModel(file, functions[function], *rest)


def network(model: str, code: str, num_classes: int) -> nn.Module:
    """Build the untrained network of a file; raise InputError if that fails, or it is no module."""
    build = load(model, code).build
    try:
        built = build(num_classes)
    except (Exception, SystemExit) as error:
        raise InputError(f"{model}({num_classes}) {describe_error(model, error)}") from error
    if not isinstance(built, nn.Module):
        raise InputError(
            f"{model}({num_classes}) returns {type(built).__name__}, not a torch.nn.Module: "
            "return the network"
        )
    return built


def describe_error(file: str, error: BaseException) -> str:
    """Describe an error and its line in the file, for the end of an error message."""
    where = ""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(f"<{file.partition(':')[0]} "):
            where = f" in line {trace.tb_lineno}"
        trace = trace.tb_next
    first = (str(error).strip().splitlines() or [""])[0]
    return f"raises {type(error).__name__}{where}: {first}; correct the file"
