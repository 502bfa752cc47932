"""The lowest layer: it imports no other package of the project."""
