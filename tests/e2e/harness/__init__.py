"""Plays a compiled pipeline on a cluster as KFP would, one pod a step."""
