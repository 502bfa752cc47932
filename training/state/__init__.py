"""What a run saves and resumes from: checkpoints, and the trained state of a rank."""
