"""Quantities of resources as Kubernetes writes them, such as 500m, 4 or 16Gi."""

from fractions import Fraction

QUANTITY = r"^$|^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$"
AMOUNT = QUANTITY.removeprefix("^$|")
_UNITS = {"m": Fraction(1, 1000)} | {
    unit + suffix: Fraction(base**power)
    for power, unit in enumerate(("k", "M", "G", "T", "P", "E"), 1)
    for suffix, base in (("", 1000), ("i", 1024))
}
_UNITS["Ki"] = _UNITS.pop("ki")


def amount(quantity: str) -> Fraction:
    """Return a quantity as a number of CPUs, bytes or pieces."""
    number = quantity.rstrip("mkKMGTPEi")
    return Fraction(number) * _UNITS.get(quantity.removeprefix(number), 1)
