"""A job that runs: its pods, their logs, its progress, and why it failed."""
