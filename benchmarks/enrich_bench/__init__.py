"""What the benchmark of `enrich` is made of."""
