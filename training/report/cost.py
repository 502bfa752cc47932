"""What a training costs by its events: GPU-hours of all attempts, and money; free of torch."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

INSTANCE_TYPE = "node.kubernetes.io/instance-type"


class Cost(NamedTuple):
    """GPU-hours and their price; of ranks on CPUs, the hours of these ranks."""

    gpu_hours: float
    money: float | None
    """None without a price; its currency is that of the price."""
    unit: str

    def __str__(self) -> str:
        money = "" if self.money is None else f", cost {self.money:.2f}"
        return f"{round(self.gpu_hours, 4):,g} {self.unit}{money}"


def cost_of(events: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]) -> Cost:
    """Return the cost of all attempts of a training with these settings.

    A rank has one GPU. An attempt lasts from the start of its processes to its last event.
    """
    seconds, ranks, previous, on_gpus = 0.0, 0.0, 0.0, True
    for event in events:
        if not (now := _number(event.get("time"))):
            continue
        if event.get("event") == "start":
            ranks = _number(event.get("world_size"))
            seconds += ranks * _number(event.get("startup_seconds"))
            on_gpus &= event.get("device") != "CPU"
        else:
            seconds += ranks * max(0.0, now - previous)
        previous = now
    return priced(seconds / 3600, settings, on_gpus)


def priced(hours: float, settings: Mapping[str, Any], on_gpus: bool) -> Cost:
    """Return the cost of so many hours of ranks by the settings of a training."""
    price = _number(settings.get("gpu_hour_price"))
    unit = "GPU-hours" if on_gpus else "rank-hours"
    return Cost(hours, hours * price if price else None, unit)


def price_on(nodes: Sequence[Mapping[str, str]], prices: Mapping[str, float]) -> float:
    """Return the highest price that a table has for nodes of these labels; 0 for none.

    A key of the table is an instance type, or a label as NAME=VALUE.
    """
    by_label = {name if "=" in name else f"{INSTANCE_TYPE}={name}": p for name, p in prices.items()}
    labels = {f"{name}={value}" for node in nodes for name, value in node.items()}
    return max((by_label[one] for one in labels & by_label.keys()), default=0.0)


def _number(value: object) -> float:
    return value if isinstance(value, int | float) and isfinite(value) and value > 0 else 0.0
