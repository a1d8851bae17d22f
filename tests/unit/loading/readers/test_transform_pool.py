"""Transformations in worker processes: their random numbers, errors and ends."""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
from numbered_rows import Dataset, module, steps

from hvd_estimators.exceptions import DataError, ReaderError
from hvd_estimators.loading.transform import Transformation, Transformed
from hvd_estimators.loading.transform_pool import TransformPool

pytestmark = pytest.mark.timeout(120)


def noisy(columns):
    count = len(columns["id"])
    drawn = [random.random() for _ in range(count)]
    return {"id": columns["id"], "noise": np.random.rand(count), "drawn": np.array(drawn)}


def read(dataset, count, function=noisy, **options):
    transformation = Transformation(batch_function=function)
    options = {"reader_pool_type": "process", "transformation": transformation, **options}
    with module(dataset, **options) as data:
        return list(itertools.islice(data.train_data(), count))


@pytest.mark.parametrize("cache", [False, True])
def test_random_numbers_depend_on_the_position_of_the_rows_alone(dataset, cache, monkeypatch):
    monkeypatch.setattr("hvd_estimators.loading.transform_pool._PIECE_BYTES", 24 * 5)
    count = steps(dataset)
    options = {"inmemory_cache_all": cache}
    expected = read(dataset, 3 * count, train_reader_worker_count=1, **options)
    noise = np.concatenate([batch["noise"] for batch in expected])
    assert len(set(noise)) == len(noise)

    others = {
        3: read(dataset, 3 * count, train_reader_worker_count=3, **options),
        2: [
            *expected[: count + 2],
            *read(dataset, 2 * count - 2, skip_train_steps=count + 2, **options),
        ],
    }

    for batches in others.values():
        assert len(batches) == 3 * count
        for batch, other in zip(expected, batches, strict=True):
            assert {n: v.tolist() for n, v in batch.items()} == {
                n: v.tolist() for n, v in other.items()
            }


def test_several_processes_transform(dataset, monkeypatch):
    monkeypatch.setattr("hvd_estimators.loading.transform_pool._PIECE_BYTES", 1)

    def mark(columns):
        return {"id": columns["id"], "process": np.full(len(columns["id"]), os.getpid())}

    count = 2 * steps(dataset)
    batches = read(dataset, count, mark, train_reader_worker_count=3, total_train_steps=count)

    used = set(np.concatenate([batch["process"] for batch in batches]).tolist())
    assert len(used) == 3
    assert os.getpid() not in used
    assert not any(map(psutil.pid_exists, used))


def test_validation_passes_use_the_same_processes(dataset, tmp_path):
    def mark(columns):
        return {"id": columns["id"], "process": np.full(len(columns["id"]), os.getpid())}

    validation = Dataset(tmp_path / "val", 11, files=2, row_group_size=3, first=1000)
    with module(
        dataset,
        transformation=Transformation(batch_function=mark),
        reader_pool_type="process",
        val_plan=validation.plan(1),
        val_batch_size=4,
        steps_per_epoch_val=3,
    ) as data:
        next(iter(data.val_data()))  # A pass that is not used to its end.
        passes = [list(data.val_data()) for _ in range(3)]

    for batches in passes:
        ids = np.concatenate([batch["id"] for batch in batches])
        assert ids.tolist() == list(range(1000, 1011))
    used = np.concatenate([batch["process"] for batches in passes for batch in batches])
    assert len(set(used.tolist())) <= 2


class OwnError(Exception):
    """An error that pickle cannot load, because its class needs two arguments."""

    def __init__(self, name, value):
        super().__init__(f"{name} is {value}")


def fail(columns):
    if 30 in columns["id"]:
        {}["missing"]
    return columns


def fail_with_own(columns):
    raise OwnError("id", 30)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [(fail, KeyError, "missing"), (fail_with_own, Exception, "raised OwnError: id is 30")],
)
def test_errors_name_the_line_of_the_users_function(dataset, function, error, message):
    with pytest.raises(error, match=message) as raised:
        read(dataset, 2 * steps(dataset), function)

    assert f"in {function.__name__}" in "".join(raised.value.__notes__)


def test_a_killed_worker_is_named(dataset):
    parent = os.getpid()

    def kill(columns):
        assert os.getpid() != parent
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ReaderError, match=r"ended \(SIGKILL\).*train_reader_num_workers"):
        read(dataset, 1, kill)


def test_a_result_that_cannot_be_pickled_is_named():
    pool = TransformPool(lambda piece: threading.Lock() if piece == 1 else piece, 1)
    try:
        with pytest.raises(DataError, match=r"TypeError: .*lock.* reader_pool_type='thread'"):
            list(pool.map(iter([(0, [1]), (1, [1])])))
        assert list(pool.map(iter([(2, [1]), (3, [1])]))) == [2, 3]
    finally:
        pool.close()


def test_arrays_of_several_forms_keep_their_values():
    columns = {
        "numbers": np.arange(24.0).reshape(4, 6),
        "columns first": np.asfortranarray(np.arange(24).reshape(4, 6)),
        "every other": np.arange(16, dtype=np.int8)[::2].reshape(4, 2),
        "bytes": np.array([b"", b"\0\1", b"x" * 10**6, b"y"], dtype=object),
        "empty": np.zeros((4, 0), np.float32),
    }
    expected = {name: array.tolist() for name, array in columns.items()}
    pool = TransformPool(Transformation(batch_function=dict, text=("bytes",)), 1)

    (result,) = pool.map(iter([(columns, [1])]))

    pool.close()
    assert {name: array.tolist() for name, array in result.items()} == expected
    assert {n: a.dtype for n, a in result.items()} == {n: a.dtype for n, a in columns.items()}


def test_results_keep_their_values_while_later_ones_come():
    pool = TransformPool(Transformation(batch_function=dict), 1)
    users = pool._workers[0]._users
    pieces = [({"x": np.full(1000, number)}, [number]) for number in range(2 * len(users))]

    results = list(pool.map(iter(pieces)))

    assert [set(result["x"].tolist()) for result in results] == [{i} for i in range(len(results))]
    # As many are in shared memory as there is room for, and its room is free without them.
    assert all(user() is not None for user in users)
    del results
    assert not any(user() is not None for user in users)
    pool.close()


def test_there_is_shared_memory_for_all_results_of_a_reader(monkeypatch):
    """A reader holds a part until it has the next one."""
    monkeypatch.setattr("hvd_estimators.loading.transform_pool._PIECE_BYTES", 800)
    transformation = Transformation(batch_function=dict)
    pool = TransformPool(transformation, 1)
    (worker,) = pool._workers
    slots, send = [], worker.send
    monkeypatch.setattr(
        worker, "send", lambda piece: (send(piece), slots.append(worker._slots[-1]))
    )
    parts = pool.transform(iter([{"x": np.arange(2000)}]), Transformed(transformation), [0], 0)

    part = next(parts)
    for following in parts:
        part = following

    assert part["x"].tolist() == list(range(1900, 2000))
    assert len(slots) == 1 + 20
    assert None not in slots
    pool.close()


def test_large_texts_in_both_directions_do_not_block():
    """Texts go through the pipe, which holds a fraction of one."""
    text = b"x" * 2**22
    pieces = [({"x": np.array([b"%d" % i + text], dtype=object)}, [i]) for i in range(6)]
    pool = TransformPool(Transformation(batch_function=dict, text=("x",)), 1)

    results = list(pool.map(iter(pieces)))

    assert [result["x"][0][:1] for result in results] == [b"%d" % i for i in range(6)]
    pool.close()


RANK = """
import sys, time
import numpy as np
from hvd_estimators.loading.transform import Transformation, Transformed
from hvd_estimators.loading.transform_pool import TransformPool

def wait(columns):
    time.sleep(0.2)
    return columns

if __name__ == "__main__":
    transformation = Transformation(batch_function=wait)
    pool = TransformPool(transformation, 2)
    parts = iter([{"id": np.arange(10)}] * 10**6)
    for number, _ in enumerate(pool.transform(parts, Transformed(transformation), [0], 0)):
        if number == 2:
            print(*(process.pid for process in (w.process for w in pool._workers)), flush=True)
"""


def test_workers_end_with_a_killed_rank(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as rank:
        assert rank.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in rank.stdout.readline().split()]
        assert len(workers) == 2
        server = workers[0].parent()
        assert server is not None
        rank.kill()
    _, alive = psutil.wait_procs([*workers, server], timeout=20)
    assert not alive
