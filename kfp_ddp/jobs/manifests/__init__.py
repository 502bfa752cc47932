"""The manifest of each kind of job."""
