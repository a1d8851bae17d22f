"""Measures the package against `horovod.spark` and against plain Horovod."""
