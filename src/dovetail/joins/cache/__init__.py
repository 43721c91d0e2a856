"""SSBJ's cache: relation rows of the join values that take less room there than their tuples take in the window."""
