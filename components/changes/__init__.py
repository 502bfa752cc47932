"""Tells whether a training would come to anything that is not known already."""
