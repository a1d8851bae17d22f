"""Log levels of frameworks on ranks."""

import logging
import os
import sys
from types import SimpleNamespace

import cloudpickle
import pytest

from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.launch.task.settings import task_environment

# A rank must not import this module, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.timeout(60)


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
