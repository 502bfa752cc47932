"""Parts of `benchmarks launch`: a job of many workers, and what its launch uses."""
