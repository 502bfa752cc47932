"""The committed pipeline on this machine: what the demo and `run --local` share."""
