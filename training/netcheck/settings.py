"""What a check of the network is asked; no torch."""

from typing import Literal

from pydantic import Field

from kfp_ddp.core.settings import Settings


class NetworkCheck(Settings):
    """What is measured, and against what."""

    gradient_mb: float = Field(102.2, gt=0)
    """Megabytes of gradients that the ranks average in a step, four bytes for each parameter of
    the network; a ResNet-50 has 102.2."""
    step_ms: float = Field(0.0, ge=0)
    """Milliseconds that a step computes, as a training tells them; 0 where that is not known."""
    min_gbit_s: float = Field(0.0, ge=0)
    """Gigabits a second that each node must send to each other one; 0 to ask for none."""
    largest_mb: float = Field(64.0, ge=1, le=1024)
    """Megabytes of the largest message, less where the network is slow."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """What the messages lie on: cuda goes by NCCL, cpu by Gloo."""
    timeout_minutes: float = Field(10.0, gt=0)
    """Time-out of a collective."""
