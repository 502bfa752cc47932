"""What the network between the nodes of a job gives, and whether a training has enough of it.

settings  what is asked
seen      what a node sees of itself: interface, MTU, InfiniBand, names
measure   collectives and pairs of nodes, timed by the ranks
record    what was found, and what that means in words
rank      one rank of it;  `python -m kfp_ddp.training.netcheck` starts those of a node
"""
