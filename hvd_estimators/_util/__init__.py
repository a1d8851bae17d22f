"""Utilities that no other package owns. They import nothing else of this package but exceptions."""
