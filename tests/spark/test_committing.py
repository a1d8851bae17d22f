"""Output commits of `prepare_data` on an object store."""

import collections

import pytest

from hvd_estimators import Store, clear_prepared_data, prepare_data

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]


@pytest.mark.parametrize(("shuffled", "copies"), [(True, 2), (False, 3)])
def test_shuffled_files_need_one_copy_less(spark, s3a, shuffled, copies):
    """Count copies, which replace renames on S3.

    Tasks copy, Spark's driver copies by default, and the move to the store's paths copies. A
    shuffled task writes the same rows when it is retried, and does without the driver's copy.
    """
    store = Store.create(f"{s3a.url}/{shuffled}", storage_options=s3a.storage_options)
    option = "mapreduce.fileoutputcommitter.algorithm.version"
    before = len(s3a.requests())
    df = spark.range(40, numPartitions=2).selectExpr(
        "id", "id * 2 as twice", "id % 4 = 0 as is_val"
    )
    with prepare_data(
        2, store, df, ["id"], ["twice"], validation="is_val", shuffle_on_write=shuffled
    ) as index:
        puts = [request.path for request in s3a.requests()[before:] if request.method == "PUT"]
        written = collections.Counter(
            path.rpartition("/")[2] for path in puts if path.endswith(".parquet")
        )
        stored = [
            path
            for side in (store.get_train_data_path(index), store.get_val_data_path(index))
            for path in s3a.objects(side)
        ]
        files = [path for path in stored if path.endswith(".parquet")]
        assert not s3a.objects(f"{store.get_train_data_path(index)}.split")
    clear_prepared_data(store)
    # The files of a task have the same name on both sides. A file is uploaded, and then copied.
    assert sum(written.values()) == len(files) * (1 + copies)
    assert spark.conf.get(option, None) is None
