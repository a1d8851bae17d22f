"""Utilities for all packages. They import only `hvd_estimators.exceptions` and each other."""
