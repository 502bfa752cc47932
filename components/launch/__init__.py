"""Launching a training job and following it to its end."""
