"""Training in one Spark application on data that another one has prepared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers.jars import jars, s3a_folder
from store_runs import make_estimator, make_frame, predict_alone

from hvd_estimators import Store, clear_prepared_data, list_prepared_data

pytestmark = [pytest.mark.soak, pytest.mark.integration, pytest.mark.spark]


@pytest.mark.parametrize("server", ["s3a", "hdfs"])
def test_data_prepared_by_one_application_trains_in_another(
    spark: Any, request: Any, tmp_path: Path, server: str
) -> None:
    place = request.getfixturevalue(server)
    options = getattr(place, "storage_options", {})
    places = [{"url": f"{place.url}/prepared", "storage_options": options}]
    job = Path(__file__).with_name("prepare_job.py")
    with open(tmp_path / "output.txt", "wb") as output:
        other = subprocess.Popen(
            [sys.executable, str(job), os.pathsep.join(jars(s3a_folder()))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    try:
        print(json.dumps(places), file=other.stdin, flush=True)
        indices = json.loads(other.stdout.readline() or "null")
        assert indices is not None, (tmp_path / "output.txt").read_text()[-8000:]
        expected = predict_alone("torch")
        for place, index in zip(places, indices, strict=True):
            store = Store.create(place["url"], storage_options=place["storage_options"])
            assert [(data.rows, data.validation_rows) for data in list_prepared_data(store)] == [
                (60, 30)
            ]
            estimator = make_estimator("torch", store=store, num_proc=2)
            model = estimator.fit_on_parquet(dataset_idx=index)
            found = model.transform(make_frame(spark)).toPandas().iloc[:, -1]
            found = np.array(found.tolist()).reshape(-1)
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
            # The data belong to another application, which is still alive.
            clear_prepared_data(store)
            assert [data.index for data in list_prepared_data(store)] == [index]
    finally:
        other.kill()
        other.wait()
    # Data left behind by the dead application are recognised and deleted.
    for place in places:
        store = Store.create(place["url"], storage_options=place["storage_options"])
        clear_prepared_data(store)
        assert list_prepared_data(store) == []
        assert [path for path in store.find(store.prefix_path) if "intermediate" in path] == []
