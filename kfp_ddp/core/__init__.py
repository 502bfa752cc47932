"""The ground floor, which all stand on and which imports nothing of ours."""
