"""Checks of settings and of the cluster before anything starts."""
