"""KFP components, a folder each: `component.py` is the signature, the engine beside it the work."""
