"""Object stores and folders: read, write, list and lease objects."""
