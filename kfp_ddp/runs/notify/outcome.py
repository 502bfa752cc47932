"""What a run came to, in words."""

import dataclasses
from typing import Any, Literal

State = Literal[
    "promoted", "exported", "blessed", "not blessed", "trained", "unchanged", "failed", "cancelled"
]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a run; what is not known is empty."""

    run_id: str
    state: State
    reason: str = ""
    """Why it failed or was not blessed, in one line."""
    step: str = ""
    """The one that failed."""
    model: str = ""
    """Name of the exported model, else its network."""
    accuracy: float | None = None
    champion: str = ""
    """The version that it was compared with."""
    champion_accuracy: float | None = None
    """On the same samples."""
    bundle: str = ""
    """Address of what was exported."""
    dataset: str = ""
    """Digest of the version that it was evaluated on."""
    address: str = ""
    """Where the UI shows the run."""

    @property
    def gain(self) -> float | None:
        """By how much it is more accurate than the champion."""
        if self.accuracy is None or self.champion_accuracy is None:
            return None
        return self.accuracy - self.champion_accuracy

    def to_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        told = {"format": 1, **dataclasses.asdict(self), "gain": self.gain}
        return {**told, "title": self.title(), "text": "\n".join(self.lines())}

    def title(self) -> str:
        """One line of what there is to know."""
        name = self.model or "run"
        match self.state:
            case "failed":
                return f"{name} failed{f' in {self.step}' if self.step else ''}"
            case "cancelled":
                return f"{name} was cancelled"
            case "unchanged":
                return "nothing was trained"
        return f"{name} {self.state}{self._accuracies()}"

    def lines(self) -> list[str]:
        """What else there is to say, each in a line."""
        facts = {
            "reason": self.reason,
            "bundle": self.bundle,
            "dataset": self.dataset[:12],
            "run": self.address or self.run_id,
        }
        return [f"{name}: {value}" for name, value in facts.items() if value]

    def _accuracies(self) -> str:
        if self.accuracy is None:
            return ""
        said = f": accuracy {self.accuracy:.2%}"
        if self.gain is None:
            return said
        return f"{said}, {self.gain * 100:+.2f} points on the champion {self.champion}".rstrip()
