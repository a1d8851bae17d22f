"""Base class of all estimators: their params, and the methods that fit. Runs on the driver."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pyspark.ml import Estimator
from pyspark.sql import Column, DataFrame

from hvd_estimators._util.spark_session import using_session
from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.fit import Fit
from hvd_estimators.fitting.framework import Fittable
from hvd_estimators.fitting.mlflow import active_run
from hvd_estimators.fitting.run import GridFit
from hvd_estimators.fitting.stores import Paths
from hvd_estimators.launch.spark_backend import SparkBackend
from hvd_estimators.model import HorovodModel
from hvd_estimators.params.estimator import EstimatorParams
from hvd_estimators.params.model import SharedParams
from hvd_estimators.prepare.datasets import SharedDatasets
from hvd_estimators.prepare.schema import is_frame, require_frame
from hvd_estimators.saving.save import Saved

M = TypeVar("M", bound=HorovodModel)

if TYPE_CHECKING:
    from hvd_estimators.params.signatures import EstimatorSignatures
else:
    EstimatorSignatures = EstimatorParams


class HorovodEstimator(Estimator[M], EstimatorSignatures, Fittable, Saved):
    """Base class of the estimators, which hold params; `Fit` fits, and a `Framework` serves it.

    A framework's estimator sets ``framework_class`` and creates the model from the ranks' results.
    """

    # What most programs set; see `DeclaredParams`.
    _described_first = (
        *("num_proc", "store", "run_id", "model", "optimizer", "loss", "metrics"),
        *("feature_cols", "label_cols", "validation", "batch_size", "epochs", "callbacks"),
    )

    def __init__(self, **kwargs: Any) -> None:
        if not hasattr(self, "framework_class"):
            raise TypeError(
                f"{type(self).__name__} has no framework_class. Set it to a subclass of "
                "hvd_estimators.fitting.framework.Framework, which serves the fits."
            )
        super().__init__()
        self.setParams(**kwargs)

    def _fit(self, dataset: DataFrame) -> M:
        """Write the DataFrame as Parquet, train on it, and return the model."""
        require_frame("dataset", dataset)
        if is_frame(validation := self.getOrDefault("validation")):
            require_frame("validation", validation)
        # Also its settings, and the ranks: this thread may have another session.
        with using_session(dataset.sparkSession), Fit(self) as fit:
            return fit.on_frame(dataset)

    def fit_on_parquet(
        self,
        path: Paths | Mapping[Any, Any] | None = None,
        dataset_idx: str | None = None,
        *,
        validation_path: Paths | None = None,
        params: Mapping[Any, Any] | None = None,
    ) -> M:
        """Train on existing Parquet files.

        Parameters
        ----------
        path : str, PathLike or sequence of them, optional
            Paths or URLs of folders or files with the training rows, all on one filesystem. A path
            without a scheme is on the store's filesystem. Default: the store's train path, and its
            validation path if ``validation`` is set to any true value. A dict is ``params``.
        dataset_idx : str, optional
            Dataset index from `prepare_data`, instead of a path.
        validation_path : str, PathLike or sequence of them, optional
            Paths or URLs of the validation rows.
        params : dict, optional
            Values by param; they override the params of this estimator.

        Returns
        -------
        HorovodModel
            The trained model.

        Raises
        ------
        ParamError
            If a param or a path is invalid.
        StoreError, ColumnError, DataError
            If there are no such files, if they lack a column, or if it contains nulls.
        """
        if isinstance(path, Mapping):
            path, params = None, path
        if dataset_idx is not None and (path is not None or validation_path is not None):
            raise ParamError(
                f"dataset_idx: found {dataset_idx!r} and a path. Pass the index of a dataset, or "
                "the paths of files."
            )
        estimator = self._with_params(params, validation_path is not None)
        with Fit(estimator) as fit:
            if dataset_idx is not None:
                return fit.on_dataset(dataset_idx)
            return fit.on_files(path, validation_path)

    def fit_on_table(
        self,
        table: str,
        where: str | Column | None = None,
        *,
        validation_where: str | Column | None = None,
        params: Mapping[Any, Any] | None = None,
    ) -> M:
        """Train on the files of a table, without a copy of its rows.

        Runs on the driver. For each condition, one Spark job lists the files that hold the chosen
        rows, and counts these rows. Ranks then read the files as `fit_on_parquet` does. Partition
        columns have their values from the paths, and the types of the table. For an Iceberg table,
        its metadata lists the files instead.

        Parameters
        ----------
        table : str
            Name of a table of Parquet files, or of a Delta or Iceberg table, as in ``spark.table``.
            These may be named by their paths, as in ``delta.`/data/table``` and
            ``iceberg.`/data/table```. If Spark lacks Delta, the package `deltalake` reads the log
            of a Delta table. The package `pyiceberg` reads the metadata of an Iceberg table.
        where : str or Column, optional
            Condition in SQL that chooses the training rows. It must choose whole files, as
            conditions on partition columns do. With a log or metadata, it may use no other columns.
            Default: all rows that ``validation_where`` does not choose.
        validation_where : str or Column, optional
            Condition that chooses the validation rows, in other files. Default: no validation.
        params : dict, optional
            Values by param; they override the params of this estimator.

        Returns
        -------
        HorovodModel
            The trained model.

        Raises
        ------
        ParamError
            If a param is invalid, or if the table is a view or has another format.
        DataError
            If the table shows only some rows of a file: ``where`` chooses them, or deletion vectors
            hide the others. Also if a column contains nulls.
        StoreError, ColumnError
            If a file is missing, lacks a column, or has other rows when ranks read it.
        """
        estimator = self._with_params(params, validation_where is not None)
        with Fit(estimator) as fit:
            return fit.on_table(table, where, validation_where)

    def _with_params(self, params: Mapping[Any, Any] | None, has_validation: bool) -> Self:
        """Return this estimator, or a copy with other params for one fit."""
        if params is not None and not isinstance(params, Mapping):
            raise ParamError(f"params: expected a dict of params, found {params!r}.")
        given = {
            **(params or {}),
            **({self.getParam("validation"): True} if has_validation else {}),
        }
        return self.copy(given) if given else self

    def fitMultiple(
        self, dataset: DataFrame, paramMaps: Sequence[Mapping[Any, Any]]
    ) -> Iterator[tuple[int, M]]:
        """Fit once per param map; Spark's validators call this method.

        Fits that need the same columns with the same options share one written dataset.

        With ``run_id``, each fit has a separate run, unless its param map sets ``run_id``. The name
        of that run is ``run_id`` and a digest of data, model, settings and index, so that the fit
        can be resumed.

        Returns
        -------
        iterator
            Iterator over (index, model). It is thread-safe.
        """
        estimator = self.copy()
        tracking = active_run() if self.getOrDefault("log_to_mlflow") else None
        shared = SharedDatasets(len(paramMaps))

        def fit_one(index: int) -> M:
            candidate = estimator.copy(paramMaps[index])
            given = {key if isinstance(key, str) else key.name for key in paramMaps[index]}
            of_run = estimator.getOrDefault("run_id") is not None and "run_id" not in given
            candidate.grid_fit = GridFit(shared, tracking, index if of_run else None)
            with shared.fit():
                return candidate.fit(dataset)

        return Fits(fit_one, len(paramMaps))

    def _get_or_create_backend(self) -> Any:
        """Return the backend that is set, or a backend with ``num_proc`` Spark tasks.

        Subclasses may override this method and return any object with ``run(fn, args, kwargs,
        env)`` and ``num_processes()``. The fit has read the params before.
        """
        backend, num_proc = self.getOrDefault("backend"), self.getOrDefault("num_proc")
        names = ("resource_profile", "gpus_per_task", "cpus_per_task")
        resources = {name: self.getOrDefault(name) for name in names}
        if backend is None:
            return SparkBackend(num_proc, verbose=self.getOrDefault("verbose"), **resources)
        for name, value in {"num_proc": num_proc, **resources}.items():
            if value is not None:
                raise ParamError(
                    f"backend and {name} are both set. Set {name} on the backend only."
                )
        return backend

    @abc.abstractmethod
    def get_model_class(self) -> type[HorovodModel]:
        """Return the class of the model that `fit` returns; subclasses can override it."""

    def _get_model_kwargs(self, **fitted: Any) -> dict[str, Any]:
        """Return the params of a fitted model, as in ``horovod.spark``.

        Subclasses can override this method.

        Parameters
        ----------
        **fitted
            ``model``, ``history``, ``run_id``, ``metadata`` and the framework's own params, by
            name.
        """
        metadata = fitted.pop("metadata")
        names = filter(self.isSet, SharedParams._declarations)
        return {
            "feature_columns": self.getOrDefault("feature_cols"),
            "label_columns": self.getOrDefault("label_cols"),
            "sample_weight_col": self.getOrDefault("sample_weight_col"),
            "_metadata": metadata,
            **{name: self.getOrDefault(name) for name in names},
            **fitted,
        }


class Fits:
    """Thread-safe iterator that runs one fit per step and returns its index and model.

    Parameters
    ----------
    fit : callable
        Runs the fit with a given index and returns its model.
    number : int
        Number of fits.
    """

    def __init__(self, fit: Callable[[int], Any], number: int) -> None:
        self._fit = fit
        self._indices = iter(range(number))
        self._lock = threading.Lock()

    def __iter__(self) -> Fits:
        return self

    def __next__(self) -> tuple[int, Any]:
        with self._lock:
            index = next(self._indices)
        return index, self._fit(index)
