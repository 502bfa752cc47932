"""One run: where its files are, its logs, description and comparison, and a download."""
