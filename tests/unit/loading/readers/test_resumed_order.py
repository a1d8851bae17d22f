"""A resumed run reads its rows in the order of a run without an interruption."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from numbered_rows import current_reader
from pyarrow import parquet

from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.data.manifest import JoinedSpec
from hvd_estimators.data.rows import ROWS
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.transform import Transformation
from hvd_estimators.store import LocalStore

pytestmark = pytest.mark.timeout(120)

BATCH = 16
STEPS = 150
"""Steps of an epoch."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write files whose text is long in one half, and short in the other."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(24):
        ids = np.arange(100) + 100 * number
        text = [f"{row:06}" + "x" * (200 if number < 12 else 5000) for row in ids]
        parquet.write_table(pa.table({"id": ids, "text": text}), folder / f"{number:02}.parquet")
    return str(folder)


def unchanged(columns):
    return columns


OPTIONS = {
    "text": {},
    "text of a transformation": {
        "transformation": Transformation(
            batch_function=unchanged, needed=("id", "text"), text=("text",)
        )
    },
    "rows": {},
}


@pytest.mark.parametrize("seed", [1, 4])
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_run_resumed_in_any_epoch_continues_the_order(folder, kind, seed):
    names = ["id", "text"]
    allowed = dict.fromkeys(names, "any") if kind == "rows" else True
    manifest = read_manifest(LocalStore(folder), folder, None, names, allow_text=allowed)
    joined = JoinedSpec(ROWS, "rows", "object", members=manifest.columns)

    def read(first_step):
        with current_reader()(
            train_dir=folder,
            val_dir=None,
            columns=(joined,) if kind == "rows" else manifest.columns,
            train_plan=plan_shards(manifest.train.row_groups, 1, seed=1),
            train_batch_size=BATCH,
            shuffle_buffer_size=2**20,
            random_seed=seed,
            skip_train_steps=first_step,
            **OPTIONS[kind],
        ) as module:
            batches = itertools.islice(module.train_data(), 3 * STEPS - first_step)
            return [
                batch[ROWS].table["id"].to_pylist() if kind == "rows" else batch["id"].tolist()
                for batch in batches
            ]

    whole = read(0)
    for epoch in range(3):
        rows = itertools.chain(*whole[epoch * STEPS : (epoch + 1) * STEPS])
        assert sorted(rows) == list(range(BATCH * STEPS))
    for first_step in (STEPS, STEPS + 75, 2 * STEPS, 2 * STEPS + 1):
        assert read(first_step) == whole[first_step:]
