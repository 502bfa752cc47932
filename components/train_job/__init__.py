"""The step that runs any TrainJob."""
