"""Framework log lines that are filtered from the output of ranks."""

import logging
import os
import sys
from types import SimpleNamespace

import cloudpickle
import pytest

from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.launch.rank import output
from hvd_estimators.launch.rank.process import RankProcess, pickle_call
from hvd_estimators.launch.task.job import task_environment

# A rank must not import this module, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.timeout(60)

NOTES = [
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n",
    "I0000 00:00:1795546954.054387   27923 cudart_stub.cc:31] Could not find cuda drivers\n",
    "E0000 00:00:1795546976.01    28484 cuda_dnn.cc:8310] Unable to register cuDNN factory: "
    "Attempting to register factory for plugin cuDNN when one has already been registered\n",
    "W0000 00:00:1795546976.01    28484 computation_placer.cc:177] computation placer already "
    "registered. Please check linkage\n",
]
NO_GPU = (
    "E0000 00:00:1795547098.292638   30305 cuda_platform.cc:52] failed call to cuInit: INTERNAL: "
    "CUDA error: Failed call to cuInit: UNKNOWN ERROR (303)\n"
)
WARNING = "W0000 00:00:1795546976.01    1076 gpu_device.cc:2342] Cannot dlopen GPU libraries.\n"
ERROR = "E0000 00:00:1795546976.01    1076 cuda_executor.cc:12] CUDA_ERROR_ILLEGAL_ADDRESS\n"
OWN = [
    "I0000 is the number of an image\n",
    "WARNING: All log messages of mine\n",
    "E1124 18:48:40.000000 gloo\n",
]
PRINTED = [*NOTES, NO_GPU, WARNING, ERROR, *OWN]


@pytest.mark.parametrize(
    ("level", "gpus", "shown"),
    [
        ("1", None, [WARNING, ERROR, *OWN]),
        ("1", [], [WARNING, ERROR, *OWN]),
        ("1", ["0"], [NO_GPU, WARNING, ERROR, *OWN]),
        ("2", None, [ERROR, *OWN]),
        ("3", ["0"], OWN),
        ("4", ["0"], OWN),
    ],
)
def test_lines_below_the_log_level_are_left_out(monkeypatch, level, gpus, shown):
    monkeypatch.setattr(output, "visible_gpus", lambda env: gpus)
    assert output.log_filter({"TF_CPP_MIN_LOG_LEVEL": level})(PRINTED) == shown


@pytest.mark.parametrize("env", [{}, {"TF_CPP_MIN_LOG_LEVEL": "0"}, {"TF_CPP_MIN_LOG_LEVEL": "x"}])
def test_all_lines_are_shown_if_the_environment_asks_for_them(env):
    assert output.log_filter(env) is None


def test_filtered_lines_appear_neither_in_the_output_nor_in_its_tail():
    def print_them():
        sys.stderr.writelines(PRINTED)
        raise ValueError

    lines = []
    call = pickle_call(print_them, (), {})
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    with RankProcess(0, "here", call, env, lines.extend) as process:
        outcome = process.outcome()
    assert lines == [ERROR, *OWN]
    assert outcome.output_tail == "".join(lines)


@pytest.mark.parametrize(
    ("executor", "driver", "given", "level"),
    [
        (None, {}, {}, "1"),
        ("0", {}, {}, "0"),
        ("0", {"TF_CPP_MIN_LOG_LEVEL": "2"}, {}, "2"),
        ("0", {}, {"TF_CPP_MIN_LOG_LEVEL": "3"}, "3"),
        (None, {}, {"TF_CPP_MIN_LOG_LEVEL": None}, None),
    ],
)
def test_the_users_log_level_wins(monkeypatch, executor, driver, given, level):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    if executor:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", executor)
    monkeypatch.setattr("pyspark.SparkFiles.getRootDirectory", lambda: "/files")
    job = SimpleNamespace(driver_env=driver, driver_path=[], service="", env=given, inherits=True)
    assert task_environment(job).get("TF_CPP_MIN_LOG_LEVEL") == level
    if not driver:
        backend = LocalBackend(1, env=given, warm_start=False)
        assert backend.run(lambda: os.environ.get("TF_CPP_MIN_LOG_LEVEL")) == [level]


def test_lightnings_advertisements_are_filtered_and_log_settings_are_restored(caplog):
    pytest.importorskip("pytorch_lightning")
    from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_module

    from hvd_estimators.lightning.loggers import quiet

    def logged(verbose):
        caplog.clear()
        with quiet(verbose):
            rank_zero_info("💡 Tip: For seamless cloud uploads, try installing something")
            rank_zero_info("GPU available: False, used: False")
        return caplog.messages

    log = rank_zero_module.log
    package = logging.getLogger(log.name.partition(".utilities")[0])
    level = package.level
    log.addHandler(caplog.handler)
    try:
        assert logged(0) == logged(1) == []
        assert set(logged(2)) == {"GPU available: False, used: False"}
    finally:
        log.removeHandler(caplog.handler)
    assert package.level == level
    assert not log.filters
