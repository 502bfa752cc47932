"""The images of a dataset: names, classes and splits, decoding, and batches."""
