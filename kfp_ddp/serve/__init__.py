"""A bundle's model behind the v2 inference protocol, on KServe's Python server."""
