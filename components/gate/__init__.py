"""Decides whether an evaluated model may be exported, and says why."""
