"""A bundle by any address that a person gives it."""

from kfp_ddp.core.errors import InputError
from kfp_ddp.models.bundle import MANIFEST, NAME, SUCCESS
from kfp_ddp.models.champion import pointed_at
from kfp_ddp.models.sealed import Sealed
from kfp_ddp.storage.addresses import check_place
from kfp_ddp.storage.destination import open_destination


def open_bundle(address: str, advice: str = "export it again") -> Sealed:
    """A whole bundle; what is read of it is checked against its manifest.

    Args:
        address: Folder or address of a bundle, of a run's results, or of a model's exports, which
            stands for the champion.
        advice: What to do where it is damaged.

    Raises:
        InputError: there is none, or its manifest is damaged.
    """
    check_place("bundle", address)
    where = open_destination(address)
    for folder in ("", f"{NAME}/"):
        found = Sealed.at(where, folder, "the bundle", advice)
        if found.listed is not None:
            return found
    if pointed := pointed_at(where):
        found = Sealed.at(where, f"{pointed}/", "the bundle", advice)
        if found.version == pointed:
            return found
        if found.listed is not None:
            raise found.damaged(f"{MANIFEST} is that of {found.version}")
        raise InputError(
            f"CHAMPION at {where.uri} names {pointed}, where that bundle is not: upload it again, "
            "or make another version the champion"
        )
    raise InputError(
        f"there is no bundle at {address}: give the folder that a run names as its bundle, "
        f"with {SUCCESS} and {MANIFEST} in it"
    )


def model_name(sealed: Sealed) -> str:
    """The model's name in the bundle, as in `serving/<name>/1/model.onnx`."""
    parts = (name.split("/") for name in sealed.listed or ())
    return next((part[1] for part in parts if part[0] == "serving" and len(part) > 2), "model")
