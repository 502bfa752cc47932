"""What a job is to be, from what people set, and what each kind of job can do."""
