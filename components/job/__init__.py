"""A step that runs a distributed job of any kind."""
