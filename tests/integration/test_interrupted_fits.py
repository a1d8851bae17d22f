"""An interrupted fit cleans up, checkpoints its current step, and resumes from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import interrupted_job
import psutil
import pytest
import resuming
from interrupted_job import EPOCHS, SLOW, UPLOADS, SlowUploads, run, when_training
from pyspark import InheritableThread
from reference import write_rows
from saved_checkpoints import read_state
from test_resuming import assert_equal_bits, end_of

from hvd_estimators.exceptions import JobCancelledError, WorkerStoreError
from hvd_estimators.fitting import restarts
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.launch.rank import supervisor
from hvd_estimators.launch.spark_backend import SparkBackend
from hvd_estimators.store.leases import holder, lease_path
from hvd_estimators.store.runs import read_metadata

PROGRAM = "import interrupted_job; interrupted_job.main()"

pytestmark = pytest.mark.integration


@pytest.fixture
def folder(tmp_path: Path, store: Any) -> Path:
    """Folder for the notes of ranks; the store has data."""
    import cloudpickle

    for module in (resuming, interrupted_job, sys.modules[__name__]):
        cloudpickle.register_pickle_by_value(module)
    write_rows(Path(store.get_train_data_path()), 107)
    write_rows(Path(store.get_val_data_path()), 30, seed=1)
    told = tmp_path / "told"
    told.mkdir()
    # Ranks agree about once a second; two fits must not finish the run before that.
    (told / SLOW).write_text("0.3")
    return told


class Leaving:
    """Notice on one machine, once there is a file."""

    def __init__(self, notice: str) -> None:
        self.notice = notice

    def __call__(self) -> bool:
        if os.environ["HOROVOD_RANK"] == "1" and os.path.exists(self.notice):
            os.unlink(self.notice)
            return True
        return False


def position(store: Any) -> tuple[int, int]:
    state = read_state(store, store.get_checkpoints("asked")[-1])
    return state.epoch, state.rows


def left_over(store: Any) -> list[str]:
    """Return the unexpected files of the run."""
    run_path = store.run_paths("asked").run_path
    kept = store.get_checkpoints("asked")
    names = {Path(path).name for path in kept} | {Path(path).stem + ".json" for path in kept}
    found = [path for path in Path(run_path).rglob("*") if path.is_file()]
    generation, owner = holder(store, run_path)
    assert owner is None
    released = Path(lease_path(run_path, generation)).name
    belongs = {*names, "metadata.json", "history.json", released}
    return [str(path) for path in found if path.name not in belongs and "logs" not in path.parts]


def states(store: Any) -> list[str]:
    noted = read_metadata(store, store.run_paths("asked").run_path)
    assert noted is not None
    return [fit["state"] for fit in noted["fits"]]


def test_sigint_and_sigterm_leave_only_a_run_that_resumes(
    backend: Any, store: Any, folder: Path, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    job = subprocess.run(
        [sys.executable, "-c", PROGRAM, store.prefix_path, str(folder)],
        env={
            **os.environ,
            "TMPDIR": str(scratch),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert job.returncode == 128 + signal.SIGTERM, job.stderr[-8000:]
    assert job.stdout == "interrupted ['interrupted']\n"
    assert "fit() with that run_id" in job.stderr
    assert states(store) == ["interrupted", "interrupted"]
    ranks = [int(path.stem) for path in folder.glob("*.rank")]
    assert len(ranks) == 4
    assert not any(map(psutil.pid_exists, ranks))
    assert left_over(store) == []
    # The process that forks ranks ends with the program; its folder stays for the next one.
    files = [path for path in scratch.rglob("*") if path.is_file()]
    assert [path for path in files if "hvd-estimators-warm" not in str(path)] == []
    assert (0, 0) < position(store) < (EPOCHS, 0)

    (folder / SLOW).unlink()
    assert_equal_bits(
        end_of(store, run(store, backend, str(folder), "asked"), "asked"),
        end_of(store, run(store, backend, str(folder), "whole"), "whole"),
    )


def test_a_notice_on_one_machine_saves_the_step_and_the_relaunch_loses_none(
    backend: Any, store: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "_LEAVING_PAUSE", 0.1)
    # Ranks that end meanwhile would end the one that uploads.
    monkeypatch.setattr(supervisor, "_GRACE_SECONDS", 0.2)
    (folder / UPLOADS).write_text("1.5")
    notice = folder / "notice"
    saved: list[list[int]] = []

    def go_on() -> None:
        saved.append([read_state(store, path).rows for path in store.get_checkpoints("asked")])
        (folder / UPLOADS).unlink()
        (folder / SLOW).unlink()

    def give_notice() -> None:
        notice.touch()
        when_training(folder, go_on)

    when_training(folder, give_notice)
    check = Leaving(str(notice))
    params: dict[str, Any] = {"preemption_check": check, "max_restarts": 1, "verbose": 1}
    slow = SlowUploads(store.prefix_path, folder)
    # The shared ranks of tests raise errors of their own.
    model = run(slow, LocalBackend(2), str(folder), "asked", **params)

    assert not notice.exists()
    assert (folder / "begun").exists()
    assert saved
    assert model.summary.restarts == 1
    noted = read_metadata(store, store.run_paths("asked").run_path)
    assert noted is not None
    (restart,) = noted["fits"][0]["restarts"]
    assert restart["error_type"] == "TrainingInterruptedError"
    assert (restart["epoch"], restart["step"]) > (0, 0)
    assert_equal_bits(
        end_of(store, model, "asked"),
        end_of(store, run(store, backend, str(folder), "whole"), "whole"),
    )


def test_ranks_that_stop_name_the_failure_of_their_checkpoint(folder: Path, store: Any) -> None:
    (folder / UPLOADS).write_text("fail")
    notice = folder / "notice"
    when_training(folder, notice.touch)
    failing = SlowUploads(store.prefix_path, folder)
    with pytest.raises(WorkerStoreError, match=r"(?s)Rank 0 .*could not be written.*no such luck"):
        run(
            failing,
            LocalBackend(2),
            str(folder),
            "asked",
            preemption_check=Leaving(str(notice)),
            max_restarts=0,
        )
    assert not notice.exists()
    assert (folder / "begun").exists()


@pytest.mark.soak
@pytest.mark.spark
def test_cancelled_and_interrupted_fits_on_spark_resume(
    spark: Any, backend: Any, store: Any, folder: Path
) -> None:
    # Spark takes up to four seconds to end the Python process of a cancelled task.
    (folder / SLOW).write_text("0.6")
    context, on_spark = spark.sparkContext, SparkBackend(2, verbose=0)
    raised: list[BaseException] = []

    def cancelled() -> None:
        context.setJobGroup("mine", "to be cancelled")
        when_training(folder, lambda: context.cancelJobGroup("mine"))
        try:
            run(store, on_spark, str(folder), "asked")
        except BaseException as error:
            raised.append(error)

    thread = InheritableThread(target=cancelled)
    thread.start()
    thread.join()
    (error,) = raised
    assert isinstance(error, JobCancelledError)
    assert "fit() with that run_id" in str(error)
    first = position(store)
    # As soon as the fit is over, the run is free and not written to.
    assert holder(store, store.run_paths("asked").run_path)[1] is None

    asked: list[float] = []

    def interrupt() -> None:
        asked.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    when_training(folder, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(store, on_spark, str(folder), "asked")
    second, seconds = position(store), time.monotonic() - asked[0]

    assert (0, 0) < first < second < (EPOCHS, 0), f"{first}, {second}, {seconds} s"
    assert states(store) == ["interrupted", "interrupted"]
    assert left_over(store) == []
    (folder / SLOW).unlink()
    assert_equal_bits(
        end_of(store, run(store, on_spark, str(folder), "asked"), "asked"),
        end_of(store, run(store, backend, str(folder), "whole"), "whole"),
    )
    assert states(store) == ["interrupted", "interrupted", "finished"]
