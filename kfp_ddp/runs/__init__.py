"""A pipeline run: its folder, training step, outcome, notifications and cleanup."""
