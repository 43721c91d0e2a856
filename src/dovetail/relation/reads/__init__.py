"""How rows of a table larger than memory are read: pages asked for together, whole passes, and what either costs."""
