"""Looking at flows: a live page, a terminal's view, Prometheus metrics; all read from the flow's checkpoint."""
