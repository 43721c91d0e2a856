"""Waiting stream tuples: where they are kept, and how they leave."""
