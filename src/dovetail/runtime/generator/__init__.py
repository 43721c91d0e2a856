"""The stream of the bursty source: skewed keys in bursts, the same in every run."""
