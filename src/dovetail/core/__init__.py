"""What every other package may use: errors, declared memory, counters, fault points, constants."""
