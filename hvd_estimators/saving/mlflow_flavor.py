"""MLflow format of fitted models: one folder for Spark, and for predictions without Spark.

MLflow calls `save_model` on the driver, and `_load_pyfunc` in the process that predicts. That
process needs neither PySpark nor Horovod. MLflow's own ``mlflow.spark`` loads the same files.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Collection
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from packaging.version import Version

from hvd_estimators._util.unpickle_imports import recording_modules
from hvd_estimators.data.arrays import Columns
from hvd_estimators.inference.standalone import load_predictor
from hvd_estimators.saving.saved import PACKAGES
from hvd_estimators.store.redaction import redacted

logger = logging.getLogger(__name__)

MOST_ROWS, MOST_VALUES = 5, 100_000
"""Largest input example; it has at least one row."""

_DATA = "sparkml"
_OWN = "hvd_estimators"
_RUNTIME = ("cloudpickle", "fsspec", "numpy", "pandas", "pyarrow", "typing_extensions")
"""Distributions that predictors import, besides the framework."""

_UNUSED = {"pyspark", "py4j"}
"""Modules that saved params may name and predictors do not need."""


def save_model(
    path: str, mlflow_model: Any, model: Any, rows: Callable[[], Columns | None]
) -> None:
    """Save a fitted model in MLflow's format; MLflow calls this function.

    Parameters
    ----------
    path : str
        The new folder.
    mlflow_model : mlflow.models.Model
        Description of the model, to be completed and saved.
    model : HorovodModel
        A model of this package; see `has_predictor`.
    rows : callable
        Returns training rows for signature and input example, or None.
    """
    mlflow: Any = importlib.import_module("mlflow.pyfunc")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, _DATA)
        _save_pipeline(model, data)
        with recording_modules() as modules:
            predictor = _load_pyfunc(str(data))
        example = signature = None
        try:
            example, signature = _describe(predictor, rows())
        except Exception as error:
            logger.warning(
                "MLflow: the model is logged without signature and input example (%s: %s).",
                type(error).__name__,
                redacted(str(error)),
            )
        framework = framework_modules(PACKAGES[_class_name(model)])
        requirements, code = find_requirements({*modules, *framework, "mlflow"} - _UNUSED)
        mlflow_model.add_flavor(
            "spark",
            pyspark_version=_spark_version(),
            model_data=f"data/{_DATA}",
            model_class="pyspark.ml.pipeline.PipelineModel",
            code=None,
        )
        mlflow.save_model(
            path,
            mlflow_model=mlflow_model,
            loader_module=__name__,
            data_path=str(data),
            # Otherwise MLflow would load the model in another process to infer the requirements.
            pip_requirements=requirements,
            code_paths=code,
            signature=signature,
            input_example=example,
        )


def framework_modules(package: str) -> list[str]:
    """Return the imported modules of the framework that a package of this project uses."""
    if package == "hvd_estimators.keras":
        return ["keras", sys.modules["keras"].backend.backend()]
    names = ["torch"]
    if package == "hvd_estimators.lightning":
        names += ["lightning", "pytorch_lightning"]
    return [name for name in names if name in sys.modules]


def has_predictor(model: Any) -> bool:
    """Return whether `save_model` can save a model: its class is one of this package's."""
    return _class_name(model) in PACKAGES


def log_spark_model(model: Any, name: str) -> None:
    """Log a model of a user's class in the active run with ``mlflow.spark``, which needs Spark.

    Predictors do not run the methods of users' classes.
    """
    pipeline: Any = importlib.import_module("pyspark.ml").PipelineModel
    requirements, code = find_requirements([type(model).__module__.partition(".")[0]])
    importlib.import_module("mlflow.spark").log_model(
        pipeline([model]),
        artifact_path=name,
        pip_requirements=[*requirements, f"pyspark=={_spark_version()}"],
        code_paths=code,
    )


def _class_name(model: Any) -> str:
    return f"{type(model).__module__}.{type(model).__name__}"


def _spark_version() -> str:
    """Return PySpark's version; clusters may have a PySpark that pip does not know."""
    return str(importlib.import_module("pyspark").__version__)


def _save_pipeline(model: Any, folder: Path) -> None:
    """Save a ``PipelineModel`` of one stage on the driver's disk.

    Spark's own writer would write on the executors.
    """
    stages = folder / "stages"
    model.write().save(f"file://{stages}/0_{model.uid}")
    document = {
        "class": "pyspark.ml.pipeline.PipelineModel",
        "timestamp": round(time.time() * 1000),
        "sparkVersion": _spark_version(),
        "uid": f"PipelineModel_{uuid.uuid4().hex[-12:]}",
        "paramMap": {"stageUids": [model.uid], "language": "Python"},
        "defaultParamMap": {},
    }
    (folder / "metadata").mkdir()
    (folder / "metadata" / "part-00000").write_text(json.dumps(document))


def _load_pyfunc(path: str) -> Any:
    """Return the predictor of a saved model; called by ``mlflow.pyfunc.load_model``."""
    # MLflow puts the model's copy of this package first. Ranks inherit the import path, so it must
    # not replace an installed package in a process that trains later.
    code = str(Path(path).parents[1] / "code")
    if code in sys.path and not __file__.startswith(code + os.sep):
        sys.path.remove(code)
        sys.path.append(code)
    (stage,) = Path(path, "stages").iterdir()
    return load_predictor(str(stage))


def _describe(predictor: Any, rows: Columns | None) -> tuple[Any, Any]:
    """Return the input example and the signature; both None without rows.

    Numbers are doubles or longs, because MLflow rejects wider numbers than a signature has.
    """
    names = predictor.feature_columns
    if rows is None:
        return None, None
    pandas: Any = importlib.import_module("pandas")
    models: Any = importlib.import_module("mlflow.models")
    width = sum(rows[name][:1].size for name in names)
    count = min(MOST_ROWS, max(1, MOST_VALUES // max(width, 1)))
    example = pandas.DataFrame({name: _cells(rows[name][:count]) for name in names})
    predicted = predictor.predict(example)
    outputs = pandas.DataFrame({name: _cells(predicted[name]) for name in predicted})
    with warnings.catch_warnings():
        # Nulls among integers: features have none.
        warnings.filterwarnings("ignore", "Hint: Inferred schema contains integer", UserWarning)
        return example, models.infer_signature(example, outputs)


def _cells(column: Any) -> Any:
    """Return the cells of a column: numbers, text, or nested lists of doubles or longs."""
    array = np.asarray(column)
    if array.dtype == object and len(array) and hasattr(array[0], "__len__"):
        return [c.tolist() if isinstance(c, np.ndarray) else c for c in array]
    wide = {"f": np.float64, "i": np.int64, "u": np.int64}.get(array.dtype.kind)
    array = array if wide is None else array.astype(wide)
    return array if array.ndim == 1 else array.tolist()


def find_requirements(modules: Collection[str]) -> tuple[list[str], list[str]]:
    """Return requirements that pip can install, and paths of code that no index has.

    An index has a distribution if pip did not install it from a folder, and this package if pip
    did not install it from a file either. Versions lose local labels, such as ``+cpu``.

    Parameters
    ----------
    modules : collection of str
        Top-level modules that the model imports, besides this package and its dependencies.
    """
    owners = metadata.packages_distributions()
    names, code = list(_RUNTIME), []
    for module in sorted({*modules, _OWN} - {*sys.stdlib_module_names, "__main__"}):
        home = _home(module)
        published = [n for n in owners.get(module, ()) if _is_published(n, module, home)]
        names += published
        if not published and home is not None:
            code.append(str(home))
    versions = {name: Version(metadata.version(name)).public for name in dict.fromkeys(names)}
    return [f"{name}=={version}" for name, version in versions.items()], code


def _home(module: str) -> Path | None:
    """Return the folder or file of a top-level module; None if it has neither."""
    spec = importlib.util.find_spec(module) if module not in sys.modules else None
    file = getattr(sys.modules.get(module), "__file__", None) or getattr(spec, "origin", None)
    if file is None or not Path(file).exists():
        return None
    path = Path(file)
    return path.parent if path.stem == "__init__" else path


def _is_published(name: str, module: str, home: Path | None) -> bool:
    distribution = metadata.distribution(name)
    folder = Path(str(distribution.locate_file("")))
    if home is not None and not home.is_relative_to(folder):
        return False
    source = json.loads(distribution.read_text("direct_url.json") or "{}")
    if module != _OWN:
        return "dir_info" not in source
    # A source folder may contain metadata of a build, without a list of installed files.
    return not source and distribution.read_text("RECORD") is not None
