"""What several components share; nothing here is a component."""
