"""Estimators and models as directories of files."""
