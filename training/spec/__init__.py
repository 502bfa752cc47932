"""What a training is told and what it leaves, free of torch: settings, batches, records."""
