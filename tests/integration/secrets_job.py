"""Train on S3 with a marked secret and report progress; run by test_secrets.py.

The settings come as a line of JSON on standard input, so that the mark is in no command line.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from servers.s3 import let_spark_reach
from store_runs import make_estimator, make_frame, send_by_value

from hvd_estimators import Store


class Waiting:
    """Callback that waits at the end of the second epoch until the test has looked around."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def on_train_begin(self, **_: Any) -> None:
        logging.basicConfig(level=logging.INFO)
        logging.getLogger("hvd_estimators").setLevel(logging.DEBUG)

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        logging.getLogger("hvd_estimators").debug("epoch %d has ended", epoch)
        if epoch == 1:
            Path(self._folder, f"{os.getpid()}.pid").touch()
            deadline = time.monotonic() + 100
            while not Path(self._folder, "go on").exists():
                assert time.monotonic() < deadline, "nobody has looked"
                time.sleep(0.1)


def say(word: str) -> None:
    """Report progress to the test and wait for its answer."""
    print(word, flush=True)
    sys.stdin.readline()


def main() -> None:
    task: dict[str, Any] = json.loads(sys.stdin.readline())
    folder = Path(task["folder"])
    logging.basicConfig(level=logging.INFO, filename=folder / "driver.log")
    logging.getLogger("hvd_estimators").setLevel(logging.DEBUG)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[3]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.extraClassPath", task["class_path"])
        .config("spark.eventLog.enabled", "true")
        .config("spark.eventLog.dir", f"file://{folder}/events")
        .config("spark.eventLog.logStageExecutorMetrics", "true")
        .config("spark.local.dir", f"{folder}/local")
        .config("spark.driver.extraJavaOptions", f"-Djava.io.tmpdir={folder}/tmp")
        .config("spark.hadoop.hadoop.tmp.dir", f"{folder}/hadoop")
        # Compressed content could not be searched.
        .config("spark.broadcast.compress", "false")
        .config("spark.shuffle.compress", "false")
        .config("spark.shuffle.spill.compress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("INFO")
    url, options = task["url"], task["storage_options"]
    let_spark_reach(spark, url, options)
    store = Store.create(url, storage_options=options)
    logging.getLogger(__name__).info("the store is %s, %r, %s", store, store, vars(store).keys())
    send_by_value()
    estimator = make_estimator(
        "torch", store=store, num_proc=2, run_id="marked", callbacks=[Waiting(str(folder))]
    )
    estimator.setParams(verbose=2)
    frame = make_frame(spark)
    model = estimator.fit(frame)
    print(estimator.explainParams(), model.explainParams(), estimator, model, file=sys.stderr)
    for stage, name in ((estimator, "estimator"), (model, "model")):
        stage.save(f"{folder}/saved/{name}")
        stage.save(f"{url}/{name}".replace("s3://", "s3a://"))
    model.transform(frame).collect()
    say(spark.sparkContext.uiWebUrl or "")
    spark.stop()


if __name__ == "__main__":
    main()
