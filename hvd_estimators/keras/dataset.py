"""Batches of columns as datasets of Keras's backend. Runs on the ranks."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hvd_estimators.keras.backend import on_tensorflow
from hvd_estimators.keras.collated import CollatedColumns
from hvd_estimators.loading.readers import DataModule
from hvd_estimators.loading.shuffle import first_batches

Form = Callable[[Mapping[str, Any]], Any]

# `tensorflow_dataset` imports TensorFlow, and `torch_dataset` torch.
_name = "tensorflow_dataset" if on_tensorflow() else "torch_dataset"
_backend: Any = importlib.import_module(f"{__package__}.{_name}")

reading_first = _backend.reading_first


class ColumnDatasets:
    """Batches of a data module as datasets.

    Parameters
    ----------
    data : DataModule
        Provides the batches; must stay open while the datasets are in use.
    prefetch : int
        Batches to prepare in advance, besides some MiB of rows that are not yet cut into batches.
    form : callable, optional
        Makes an element from a batch; see `tensorflow_dataset.column_dataset`.
    val_form : callable, optional
        The same for validation. Default: ``form``.
    collated : CollatedColumns, optional
        Makes the columns of batches from a collate function or padding.
    """

    def __init__(
        self,
        data: DataModule,
        prefetch: int = 0,
        form: Form | None = None,
        val_form: Form | None = None,
        collated: CollatedColumns | None = None,
    ) -> None:
        self._data = data
        self._form = form
        self._val_form = val_form or form
        self._prefetch = prefetch
        self._collated = collated
        chunks = data.train_chunks()
        first = next(chunks)
        # The first chunk defines the columns and their types.
        self._first = self._columns(first)
        self._chunks = itertools.chain([first], chunks)

    def train(self, skipped: int = 0) -> Any:
        """Return the training batches of the run, which can be iterated only once.

        Parameters
        ----------
        skipped : int
            Number of steps before them that do not train, see `PartialEpoch.skip`.
        """
        count, chunks = self._data.num_train_batches(), self._chunks
        # The backend reads ahead, and the next chunk may belong to another pass over the files.
        used = chunks if count is None else first_batches(chunks, count)
        return _backend.train_dataset(
            map(self._columns, used), self._first, self._prefetch, self._form, skipped
        )

    def validation(self, steps: int) -> Any:
        """Return at most ``steps`` validation batches; every iteration reads them from the start.

        On TensorFlow, the dataset reports its number of batches if the data module does.
        """
        batches = self._data.num_val_batches()

        def chunks() -> Iterator[Any]:
            return map(self._columns, self._data.val_chunks())

        return _backend.validation_dataset(
            chunks, self._first, self._prefetch, self._val_form, steps, batches
        )

    def _columns(self, chunk: Any) -> Any:
        """Return the columns of a collated batch, and a chunk of several batches unchanged."""
        return chunk if self._collated is None else self._collated.columns(chunk)

    @property
    def batch(self) -> Any:
        """The first batch."""
        return _backend.first(self._first, self._form)
