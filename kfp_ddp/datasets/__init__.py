"""Dataset versions: sync, verification, packing and volumes."""
