"""Ranks trainings that were tried with different settings, and hands on the best."""
