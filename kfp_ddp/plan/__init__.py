"""What a run will be: the form and its settings, checked and laid out before anything starts."""
