"""Publication of a bundle."""
