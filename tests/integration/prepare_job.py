"""Prepare data in several stores and hold them until the end; for test_applications.py."""

from __future__ import annotations

import contextlib
import json
import os
import sys

from pyspark.sql import SparkSession
from servers.s3 import let_spark_reach
from store_runs import make_frame

from hvd_estimators import Store, prepare_data


def main(class_path: str) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.extraClassPath", class_path)
        .getOrCreate()
    )
    indices = []
    with contextlib.ExitStack() as stack:
        for place in json.loads(sys.stdin.readline()):
            if place["storage_options"]:
                let_spark_reach(spark, place["url"], place["storage_options"])
            store = Store.create(place["url"], storage_options=place["storage_options"])
            prepared = prepare_data(
                2,
                store,
                make_frame(spark),
                ["label"],
                ["features"],
                validation="held out",
                shuffle_on_write=False,
            )
            indices.append(stack.enter_context(prepared))
        print(json.dumps(indices), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
