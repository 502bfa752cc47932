"""What lies at a destination of exports: the whole bundles of each model."""

import re

from kfp_ddp.models.bundle import SUCCESS
from kfp_ddp.storage.destination import Destination


def exported(where: Destination, name: str = "") -> dict[str, list[str]]:
    """The versions of each model, by its name.

    Args:
        where: The destination.
        name: Of one model, for its versions alone; '' for all.

    Raises:
        InputError: the destination cannot be listed.
    """
    found: dict[str, list[str]] = {}
    for path, _ in where.list(f"{name}/" if name else ""):
        parts = path.split("/")
        if len(parts) == 3 and parts[2] == SUCCESS and re.fullmatch("[0-9a-f]{12}", parts[1]):
            found.setdefault(parts[0], []).append(parts[1])
    return {name: sorted(found[name]) for name in sorted(found)}
