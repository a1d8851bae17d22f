"""``horovod.spark.common.constants``, which this package itself does not use."""

from __future__ import annotations

__all__ = [
    "ARRAY",
    "BYTES_PER_GIB",
    "CUSTOM_SPARSE",
    "DENSE_VECTOR",
    "METRIC_PRINT_FREQUENCY",
    "MIXED_SPARSE_DENSE_VECTOR",
    "NOCHANGE",
    "PETASTORM_HDFS_DRIVER",
    "SPARSE_VECTOR",
    "TOTAL_BUFFER_MEMORY_CAP_GIB",
]

PETASTORM_HDFS_DRIVER = "libhdfs"
METRIC_PRINT_FREQUENCY = 100
ARRAY = "array"
CUSTOM_SPARSE = "custom_sparse_format"
NOCHANGE = "nochange"
MIXED_SPARSE_DENSE_VECTOR = "mixed_sparse_dense_vector"
SPARSE_VECTOR = "sparse_vector"
DENSE_VECTOR = "dense_vector"
TOTAL_BUFFER_MEMORY_CAP_GIB = 4
BYTES_PER_GIB = 2**30
