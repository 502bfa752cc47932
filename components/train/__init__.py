"""The step that trains a ResNet with PyTorch DDP."""
