"""Turns a checkpoint into a bundle that other runtimes serve, and proves that they agree."""
