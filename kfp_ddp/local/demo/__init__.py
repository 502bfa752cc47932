"""The demo: the committed pipeline, run for real on this machine."""
