"""``horovod.spark``'s names in this package: their targets, and errors for unsupported names."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_estimators._util.horovod_spark_names import HOMES, LEFT_OUT_MODULES, LEFT_OUT_NAMES
from hvd_estimators.compat.finder import ALIASES
from hvd_estimators.exceptions import DependencyError, LeftOutError, ParamError
from hvd_estimators.launch.rank.process import RankProcess, pickle_call
from hvd_estimators.loading.transform import Transformation, Transformed
from hvd_estimators.loading.transform_pool import TransformPool
from hvd_estimators.store import LocalStore, Store
from hvd_estimators.store.base import LEFT_OUT

pytestmark = pytest.mark.versions

# Module and name in horovod.spark, and the module here.
NAMES = [
    ("", "run", "hvd_estimators.launch.api"),
    ("", "run_elastic", "hvd_estimators.launch.api"),
    (".runner", "run_elastic", "hvd_estimators.launch.api"),
    (".common.backend", "Backend", "hvd_estimators.launch.backend"),
    (".common.datamodule", "DataModule", "hvd_estimators.loading.readers"),
    (".common.estimator", "HorovodEstimator", "hvd_estimators.estimator"),
    (".common.estimator", "HorovodModel", "hvd_estimators.model"),
    (".common.store", "DBFSLocalStore", "hvd_estimators.store.local"),
    (".common.store", "FilesystemStore", "hvd_estimators.store.filesystem"),
    (".common.store", "HDFSStore", "hvd_estimators.store.hdfs"),
    (".common.store", "LocalStore", "hvd_estimators.store.local"),
    (".common.store", "Store", "hvd_estimators.store.base"),
    (".common.util", "clear_training_cache", "hvd_estimators.prepare.datasets"),
    (".common.util", "get_dataset_properties", "hvd_estimators.prepare.datasets"),
    (".common.util", "prepare_data", "hvd_estimators.prepare.dataframe"),
    (".common.estimator", "EstimatorParams", "hvd_estimators.estimator"),
    (".keras.estimator", "EstimatorParams", "hvd_estimators.estimator"),
    (".lightning.estimator", "HorovodEstimator", "hvd_estimators.estimator"),
    (".torch.estimator", "HorovodModel", "hvd_estimators.model"),
    (".keras", "KerasEstimator", "hvd_estimators.compat.keras"),
    (".keras.estimator", "KerasModel", "hvd_estimators.keras.model"),
    (".lightning", "TorchEstimator", "hvd_estimators.compat.lightning"),
    (".lightning.estimator", "TorchModel", "hvd_estimators.lightning.model"),
    (".task", "get_available_devices", "hvd_estimators.launch.gpus"),
    (".task.task_info", "get_available_devices", "hvd_estimators.launch.gpus"),
    (".torch", "TorchModel", "hvd_estimators.torch.model"),
    (".torch.estimator", "TorchEstimator", "hvd_estimators.compat.torch"),
]


def in_a_fresh_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, text=True, capture_output=True, env=environment, check=False)


@pytest.mark.parametrize(("module", "name", "home"), NAMES)
def test_a_name_resolves_to_this_package(compat: None, module: str, name: str, home: str) -> None:
    found = getattr(importlib.import_module(f"horovod.spark{module}"), name)

    assert found is getattr(importlib.import_module(home), found.__name__)
    assert importlib.import_module(f"horovod.spark{module}").__spec__.name.startswith("hvd_")


def test_both_names_of_a_module_are_the_same_module(compat: None) -> None:
    for key in HOMES:
        name = f".{key}" if key else ""
        theirs = importlib.import_module(f"horovod.spark{name}")
        assert theirs is importlib.import_module(f"hvd_estimators.compat.spark{name}")
        for public in theirs.__all__:
            if public != "PetastormDataModule":  # needs Petastorm
                assert getattr(theirs, public) is not None
    import horovod.spark

    assert horovod.spark.common.util is sys.modules["hvd_estimators.compat.spark.common.util"]


@pytest.mark.parametrize("name", sorted(LEFT_OUT_MODULES))
def test_an_unsupported_module_names_its_replacement(compat: None, name: str) -> None:
    package, _, last = name.rpartition(".")
    for statement in (f"import {name}", f"from {package} import {last}", f"import {name}.deeper"):
        with pytest.raises(LeftOutError) as error:
            exec(statement)
        assert LEFT_OUT_MODULES[name] in str(error.value)
        assert name in str(error.value)


@pytest.mark.parametrize("module", sorted(LEFT_OUT_NAMES))
def test_an_unsupported_name_names_its_replacement(compat: None, module: str) -> None:
    for name, instead in LEFT_OUT_NAMES[module].items():
        with pytest.raises(LeftOutError) as error:
            exec(f"from {module} import {name}")
        assert str(error.value) == f"hvd_estimators has no {module}.{name}. {instead}"


def test_an_unsupported_store_method_names_its_replacement(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    for name, instead in LEFT_OUT.items():
        with pytest.raises(AttributeError) as error:
            getattr(store, name)
        assert str(error.value) == f"LocalStore has no {name}, unlike horovod.spark. {instead}"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = store.nothing

    class Broken(LocalStore):
        @property
        def fs(self) -> Any:
            return None.missing  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = Broken(str(tmp_path)).fs


def test_the_guide_lists_all_unsupported_names() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "migrating.rst").read_text()
    names = {name for left_out in [*LEFT_OUT_NAMES.values(), LEFT_OUT] for name in left_out}
    modules = {name.removeprefix("horovod.spark") for name in LEFT_OUT_MODULES}
    assert sorted(name for name in names | modules if f"``{name}``" not in guide) == []


def test_unknown_names_raise_the_usual_error(compat: None) -> None:
    for statement in ("import horovod.spark.nothing", "from horovod.spark.torch import Nothing"):
        with pytest.raises(ImportError) as error:
            exec(statement)
        assert not isinstance(error.value, LeftOutError)
    with pytest.raises(AttributeError, match=r"'horovod\.spark\.torch' has .* 'TorchModel'\?"):
        _ = importlib.import_module("horovod.spark.torch").TorchModels


def frozen_modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield names and sources of the modules that are not left out entirely."""
    frozen = Path(importlib.import_module("horovod").__path__[0], "spark")
    if not (frozen / "runner.py").exists():
        pytest.skip("Horovod was installed with compat: the frozen package is gone")
    for path in frozen.rglob("*.py"):
        parts = path.relative_to(frozen).with_suffix("").parts
        module = "horovod.spark" + "".join(f".{part}" for part in parts if part != "__init__")
        if not any(f"{module}.".startswith(f"{left_out}.") for left_out in LEFT_OUT_MODULES):
            yield module, ast.parse(path.read_text())


def test_every_public_name_of_the_frozen_package_exists_or_is_explained(compat: None) -> None:
    """Public names are those that a module's source defines."""
    unexplained = []
    for module, tree in frozen_modules():
        for name in public_names(tree):
            if name in LEFT_OUT_NAMES.get(module, {}):
                continue
            try:
                exec(f"from {module} import {name}")
            except DependencyError:
                assert name == "PetastormDataModule"  # Petastorm may not be installed
            except ImportError:
                unexplained.append(f"{module}.{name}")
    assert sorted(unexplained) == INTERNAL


# Internals of the frozen launcher and reader.
INTERNAL = [
    "horovod.spark.lightning.datamodule.PETASTORM_HDFS_DRIVER",
    "horovod.spark.runner.MINIMUM_COMMAND_LIFETIME_S",
    "horovod.spark.runner.WAIT_FOR_COMMAND_START_DELAY_SECONDS",
    "horovod.spark.runner.WAIT_FOR_SHUTDOWN_DELAY_SECONDS",
    "horovod.spark.task.task_info.TaskInfo",
    "horovod.spark.task.task_info.set_resources",
]


def test_every_public_method_and_param_exists_or_is_explained(compat: None) -> None:
    """Including accessors and the constructor arguments of estimators and models."""
    missing, params = set(), 0
    for module, tree in frozen_modules():
        for node in tree.body:
            if not isinstance(node, ast.ClassDef) or "datamodule" in module:
                continue
            if node.name in LEFT_OUT_NAMES.get(module, {}):
                continue
            ours = getattr(importlib.import_module(module), node.name, None)
            if ours is None:
                assert f"{module}.{node.name}" in INTERNAL
                continue
            missing |= {
                f"{node.name}.{name}"
                for name in public_names(node)
                if not hasattr(ours, name) and name not in LEFT_OUT
            }
            if module.endswith(".estimator") and "common" not in module:
                init = next(f for f in node.body if getattr(f, "name", "") == "__init__")
                assert isinstance(init, ast.FunctionDef)
                given = {argument.arg for argument in init.args.args[1:]}
                missing |= given - {param.name for param in ours().params}
                params += len(given)
    # Internal constants of the stores.
    assert missing == {
        "DBFSLocalStore.DBFS_PATH_FORMAT_ERROR",
        "HDFSStore.FS_PREFIX",
        "HDFSStore.URL_PATTERN",
    }
    assert params > 100


def public_names(tree: ast.Module | ast.ClassDef) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [t.id for t in node.targets if isinstance(t, ast.Name)]
        else:
            continue
        yield from (name for name in names if not name.startswith("_"))


def test_the_backend_has_the_attributes_that_subclasses_use(compat: None) -> None:
    from horovod.spark.common.backend import SparkBackend

    from hvd_estimators.launch import spark_backend

    class Given(SparkBackend):
        pass

    environment = {"A": "1"}
    backend = Given(2, environment, verbose=2, prefix_output_with_timestamp=True)
    assert isinstance(backend, spark_backend.SparkBackend)
    assert (backend._num_proc, backend.num_processes()) == (2, 2)
    assert backend._env == environment
    assert backend._kwargs == {"verbose": 2, "prefix_output_with_timestamp": True}


def test_helpers_of_util_and_conf(compat: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.spark.common import util
    from horovod.spark.conf import SPARK_CONF_BLACKLIST_ENABLED

    assert util.to_list(None, 2) is None
    assert util.to_list("a", 2) == util.to_list(["a"], 2) == ["a", "a"]
    assert util.to_list([1, 2], 2) == [1, 2]
    with pytest.raises(ValueError, match="a list of 3, or of one, found 2"):
        util.to_list([1, 2], 3)
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17")
    assert util.is_databricks()
    assert SPARK_CONF_BLACKLIST_ENABLED == ("spark.excludeOnFailure.enabled", "true")


def test_ranks_know_the_names_before_unpickling(compat: None, tmp_path: Path) -> None:
    """A class of a module that imports horovod.spark is pickled by reference."""
    (tmp_path / "users_library.py").write_text(
        "import os\n"
        "from horovod.spark.common.store import Store\n"
        "class Tokenizer:\n"
        "    def __call__(self):\n"
        "        return os.getpid(), Store.__module__\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        from users_library import Tokenizer  # type: ignore[import-not-found]

        call = pickle_call(Tokenizer(), (), {})
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("users_library", None)

    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with RankProcess(0, "here", call, {**os.environ, "PYTHONPATH": path}) as process:
        outcome = process.outcome()
    assert outcome.result is not None, outcome.error
    pid, home = importlib.import_module("pickle").loads(outcome.result)
    assert pid != os.getpid()
    assert home == "hvd_estimators.store.base"


def test_transforming_processes_know_the_names_before_unpickling(
    compat: None, tmp_path: Path
) -> None:
    (tmp_path / "users_transformations.py").write_text(
        "from horovod.spark.common.store import Store\n"
        "def named(columns):\n"
        "    return {'letters': columns['number'] + len(Store.__module__)}\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        from users_transformations import named  # type: ignore[import-not-found]

        transformation = Transformation(batch_function=named)
        pool = TransformPool(transformation, 1)
        parts = iter([{"number": np.arange(3)}])
        (found,) = pool.transform(parts, Transformed(transformation), [0], 0)
        pool.close()
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("users_transformations", None)

    letters = len("hvd_estimators.store.base")
    assert found["letters"].tolist() == [letters, letters + 1, letters + 2]


def test_an_already_imported_frozen_package_is_an_error() -> None:
    done = in_a_fresh_process(
        """
        import sys, types
        sys.modules["horovod.spark"] = types.ModuleType("horovod.spark")
        import hvd_estimators.compat
        """
    )
    assert "LeftOutError: horovod.spark is already imported, from None. Import" in done.stderr


def test_compat_imports_neither_frameworks_nor_spark() -> None:
    done = in_a_fresh_process(
        """
        import sys
        import hvd_estimators.compat
        print(*sorted({name.partition(".")[0] for name in sys.modules}))
        import horovod.spark
        print(*sorted({name.partition(".")[0] for name in sys.modules}))
        """
    )
    first, second = (set(line.split()) for line in done.stdout.splitlines())
    frameworks = {"torch", "tensorflow", "keras", "lightning", "pytorch_lightning"}
    assert not first & (frameworks | {"pyspark", "horovod", "numpy"})
    assert not second & frameworks


def test_keras_callbacks_are_compatible_with_keras_3(compat: None) -> None:
    from horovod.tensorflow.keras import callbacks

    from hvd_estimators import keras

    assert callbacks.__name__ == ALIASES["horovod.tensorflow.keras.callbacks"]
    best = callbacks.BestModelCheckpoint(monitor="val_loss", mode="auto", save_freq="epoch")
    assert isinstance(best, keras.BestModelCheckpoint)
    assert isinstance(callbacks.BroadcastGlobalVariablesCallback(0, ""), keras.BroadcastCallback)
    assert isinstance(callbacks.MetricAverageCallback(""), keras.MetricAverageCallback)
    assert callbacks.BestModelCheckpoint("val_loss", 0, False, "auto", "epoch").save_best_only
    with pytest.raises(ParamError, match="save_weights_only: found True"):
        callbacks.BestModelCheckpoint(save_weights_only=True)
    with pytest.raises(ParamError, match="local_variables: found some"):
        callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[1])
    # Without a warm-up the rate stays.
    warmup = callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=0, steps_per_epoch=2)
    assert not any(warmup._sets_rate(epoch) for epoch in (0.0, 0.5, 1.0))


def test_keras_optimizers_average_over_ranks_or_are_rejected(compat: None, tmp_path: Path) -> None:
    """Horovod's own optimizers would silently train each rank separately."""
    import horovod.keras
    import horovod.tensorflow.keras as hvd
    import keras

    from hvd_estimators.compat import horovod_keras
    from hvd_estimators.keras.gradients import is_distributed

    assert horovod.keras.DistributedOptimizer is hvd.DistributedOptimizer
    assert hvd.DistributedOptimizer is horovod_keras.DistributedOptimizer
    adam = hvd.DistributedOptimizer(
        keras.optimizers.Adam(), name="adam", compression=hvd.Compression.fp16, op=hvd.Average
    )
    assert is_distributed(adam)
    refused = [
        ({"op": hvd.Sum}, "op: expected Average"),
        ({"backward_passes_per_step": 2}, "average_aggregated_gradients: expected True"),
        ({"process_set": hvd.ProcessSet([0])}, "process_set: expected the global process set"),
    ]
    for arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(keras.optimizers.Adam(), **arguments)
    with pytest.raises(LeftOutError, match="Use DistributedOptimizer"):
        horovod.keras.PartialDistributedOptimizer(adam)

    class Own(keras.optimizers.SGD):
        pass

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(Own(0.25), "mse")
    model.save(tmp_path / "model.keras")
    loaded = hvd.load_model(str(tmp_path / "model.keras"), custom_optimizers=[Own])
    assert is_distributed(loaded.optimizer)
    assert float(loaded.optimizer.learning_rate) == 0.25


def test_names_of_lightning_1_that_libraries_import_exist(
    compat: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    utilities = importlib.import_module("pytorch_lightning.utilities")
    monkeypatch.delattr(utilities, "_module_available", raising=False)
    sys.modules.pop("hvd_estimators.compat.spark.lightning", None)
    importlib.import_module("horovod.spark.lightning")
    assert utilities._module_available("horovod")
    assert not utilities._module_available("no_such_module_at_all")


def test_estimators_may_derive_from_their_params_as_in_horovod_spark() -> None:
    from hvd_estimators.estimator import EstimatorParams, HorovodEstimator
    from hvd_estimators.torch import TorchEstimator

    class Ours(EstimatorParams):
        pass

    class First(HorovodEstimator, EstimatorParams):
        pass

    class Second(HorovodEstimator, Ours):
        pass

    class Third(TorchEstimator, EstimatorParams):
        pass

    for each in (First, Second, Third):
        assert each.mro().index(HorovodEstimator) < each.mro().index(EstimatorParams)
