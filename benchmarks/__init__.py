"""Each module measures one part against named peers in the same run; see `__main__`."""
