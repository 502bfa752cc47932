"""Forms of the address of a folder: a path, a URI in a bucket, or a dataset per node."""

PER_NODE = "each-node:"
"""Prefix of a dataset that each node syncs to a folder of its own."""


def is_remote(address: str) -> bool:
    """Return whether the address is a URI such as gs://bucket/prefix, not a path."""
    return "://" in address


def is_per_node(dataset: str) -> bool:
    """Return whether each node syncs this dataset itself; False for a folder."""
    return dataset.startswith(PER_NODE)
