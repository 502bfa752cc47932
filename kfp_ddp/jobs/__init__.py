"""One job, or the ranks of this machine, from a specification to the end; README.md maps it."""
