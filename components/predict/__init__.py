"""A table with the class of each object of a source."""
