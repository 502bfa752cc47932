"""Several trainings with different settings, and the best of them."""
