"""The first step of a training run: everything that can be known before a byte moves."""
