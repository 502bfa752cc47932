"""Export of a checkpoint to a bundle, and its publication."""
