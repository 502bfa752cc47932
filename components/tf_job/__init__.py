"""The step that runs any TFJob."""
