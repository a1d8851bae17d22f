"""Benchmarks of the package against `horovod.spark` and plain Horovod."""
