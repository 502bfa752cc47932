"""Where a bundle comes from, as its `config.json` says beside the settings it was trained with."""

import time
from typing import NamedTuple


class Lineage(NamedTuple):
    """What the export was told; a bundle that is there stays, whoever is the champion now."""

    run_id: str = ""
    champion: str = ""
    """Where the model lay that it was compared with."""
    champion_version: str = ""
    """The version of that model; '' for none."""

    def record(self, dataset_digest: str) -> dict[str, str]:
        """What the bundle says of it."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return {**self._asdict(), "dataset_digest": dataset_digest, "exported_at": at}
