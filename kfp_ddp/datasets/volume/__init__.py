"""PVCs from which many pods read one dataset version."""
