"""A rank's process, seen from both of its ends: by the rank, and by the parent that watches it."""
