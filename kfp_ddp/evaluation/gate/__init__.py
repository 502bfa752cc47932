"""The gate: rules that a model must pass before export."""
