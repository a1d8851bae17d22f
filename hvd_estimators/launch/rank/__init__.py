"""A rank's process: the code inside the rank and the code of the parent that watches it."""
