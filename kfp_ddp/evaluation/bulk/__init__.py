"""Batch prediction: a table with one row for each object of a source."""
