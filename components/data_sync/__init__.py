"""The component `data_sync`: a bucket prefix to a verified version on a claim."""
