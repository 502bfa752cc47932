"""Tells a registry of models what lies at a destination of exports."""
