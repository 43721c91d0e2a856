"""Results: their columns, batches of bounded size, and their order."""
