"""The step that runs any MPIJob."""
