"""The component `dataset_volume`: a version of a dataset as a claim that workers mount."""
