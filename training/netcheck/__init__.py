"""Measure the network between the nodes of a job, and tell whether it is enough for a training.

record    settings and result, and what the result means
measure   collectives and transfers between pairs of nodes, timed by the ranks
rank      one rank; `python -m kfp_ddp.training.netcheck` starts the ranks of a node
"""
