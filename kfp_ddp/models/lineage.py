"""Where a published bundle comes from, as it says itself beside the settings of its training."""

import json
import time
from pathlib import Path
from typing import NamedTuple

FILE = "lineage.json"
"""In a bundle; older ones say the same in their `config.json`, as `lineage`."""


class Lineage(NamedTuple):
    """What the publishing was told; a bundle that is there stays, whoever is the champion now."""

    run_id: str = ""
    champion: str = ""
    """Where the model lay that it was compared with."""
    champion_version: str = ""
    """The version of that model; '' for none."""

    def record(self, dataset_digest: str) -> dict[str, str]:
        """What the bundle says of it."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return {**self._asdict(), "dataset_digest": dataset_digest, "exported_at": at}

    def is_in(self, bundle: Path) -> bool:
        """Whether a bundle says the same, at whatever time."""
        try:
            said = json.loads((bundle / FILE).read_text(encoding="utf-8"))
            return {name: said[name] for name in self._fields} == self._asdict()
        except (OSError, ValueError, KeyError, TypeError):
            return False
