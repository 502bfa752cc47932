"""What a job is to be, and the manifest of each kind of job."""
