"""Measures the network between the pods of a job, and names what is slow in it."""
