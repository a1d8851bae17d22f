"""Output of ranks during training: the user's lines, and no notices of frameworks."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import keras_reference
import lightning_reference
import pytest
import reference
from reference import write_rows
from variants import others_in_soak

from hvd_estimators.launch import LocalBackend

pytestmark = pytest.mark.timeout(300)

# TensorFlow prints some lines whatever its log level, such as of cuInit and oneDNN.
NOTICES = ("cpu_feature_guard", "To enable the following instructions", "💡", "litlogger")


@pytest.fixture(autouse=True)
def _no_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    for module in (reference, keras_reference, lightning_reference):
        cloudpickle.register_pickle_by_value(module)


def printed_lines(text: str, kinds: tuple[str, ...] = NOTICES) -> list[str]:
    return [line for line in text.splitlines() if any(kind in line for kind in kinds)]


@pytest.mark.parametrize("warm_start", others_in_soak(True, False))
def test_keras_ranks_print_notices_only_on_request(
    store: Any, capfd: pytest.CaptureFixture[str], warm_start: bool
) -> None:
    import keras

    class Speaker(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            print("end of epoch", epoch, file=sys.stderr)

    write_rows(Path(store.get_train_data_path()), 32)
    output = io.StringIO()
    capfd.readouterr()
    estimator = keras_reference.make_estimator(
        store,
        2,
        backend=LocalBackend(2, stderr=output, stdout=output, warm_start=warm_start),
        callbacks=[Speaker()],
        verbose=int(warm_start),
    )
    estimator.fit_on_parquet()
    shown = output.getvalue()
    assert shown.count("end of epoch 0") == 2
    assert not printed_lines(shown)
    if warm_start:
        shown = capfd.readouterr().err
        late = r"(Starting 2 processes.* \.\.\.\n)*"
        rate = r"2 processes average gradients with Horovod\.\nLearning rate 0\.\d+\.\n"
        lines = (
            rf"existing files: 32 training rows\.\n{rate}{late}"
            r"Started 2 processes in .*\nEpoch 1/1: "
        )
        assert re.search(lines, shown), shown
        return

    def use_tensorflow() -> None:
        import tensorflow as tf

        tf.config.list_physical_devices("GPU")

    everything = io.StringIO()
    # What is printed when TensorFlow is imported is in the rank's output, not a warm process's.
    asked = {"TF_CPP_MIN_LOG_LEVEL": "0"}
    LocalBackend(1, env=asked, stdout=everything, stderr=everything, warm_start=False).run(
        use_tensorflow
    )
    assert printed_lines(everything.getvalue())
