"""What is sent to KFP: checked arguments, the source for public images, the job of a function."""
