"""One file per public verb."""
