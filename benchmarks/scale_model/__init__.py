"""A model of how data-parallel training scales: a file a part, put together in `expected`."""
