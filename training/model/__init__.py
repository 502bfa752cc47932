"""Networks, and how they are spread over the ranks."""
