"""The client of a KFP server, its runs, schedules and models."""
