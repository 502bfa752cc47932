"""Rollout of a bundle as a KServe InferenceService."""
