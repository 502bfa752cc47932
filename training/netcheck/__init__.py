"""The network between the nodes of a job: its measurement and its meaning for a training."""
