"""What runs need in a namespace: its objects, made, written to files, or deleted."""
