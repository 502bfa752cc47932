"""What `benchmarks gpu` measures, each part in processes of its own."""
