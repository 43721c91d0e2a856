"""What a multi-way join does with tuples that do not fit in memory."""
