"""Batches of columns as ``tf.data`` datasets. Runs on the ranks.

Rows cross from NumPy to TensorFlow in chunks of many batches (`Chunk`), some MiB at a time.
TensorFlow then splits the chunks into columns, stacks the columns by batch, and slices the stacks.
So neither Python code nor a traced function runs once per batch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from hvd_estimators.launch.rank.hang_detection import made_progress
from hvd_estimators.loading.readers import DataModule
from hvd_estimators.loading.shuffle import Chunk, first_batches

Form = Callable[[dict[str, tf.Tensor]], Any]
Step = Callable[[Any], Any]


class ColumnDatasets:
    """Batches of a data module as datasets.

    Parameters
    ----------
    data : DataModule
        Provides the batches; must stay open while the datasets are in use.
    rows : int, optional
        Rows of every training batch, if all have the same number. Their shape is then static.
    prefetch : int
        Batches to prepare in advance, besides some MiB of rows that are not yet cut into batches.
    form : callable, optional
        Makes an element from a batch; see `column_dataset`.
    val_form : callable, optional
        The same for validation. Default: ``form``.
    """

    def __init__(
        self,
        data: DataModule,
        rows: int | None = None,
        prefetch: int = 0,
        form: Form | None = None,
        val_form: Form | None = None,
    ) -> None:
        self._data = data
        self._form = form
        self._val_form = val_form or form
        self._rows = rows
        self._prefetch = prefetch
        chunks = data.train_chunks()
        # The first chunk defines the columns and their types.
        self._first = next(chunks)
        self._chunks = itertools.chain([self._first], chunks)

    def train(self) -> tf.data.Dataset:
        """Return the training batches of the run, which can be iterated only once."""
        count, chunks = self._data.num_train_batches(), self._chunks
        # TensorFlow reads ahead, and the next chunk may belong to another pass over the files.
        used = chunks if count is None else first_batches(chunks, count)
        dataset = column_dataset(lambda: used, self._first, self._rows, self._prefetch, self._form)
        return _of_length(dataset, tf.data.INFINITE_CARDINALITY)

    def validation(self, steps: int) -> tf.data.Dataset:
        """Return at most ``steps`` validation batches; every iteration reads them from the start.

        The dataset reports its number of batches if the data module does.
        """
        chunks = self._data.val_chunks
        dataset = column_dataset(chunks, self._first, None, self._prefetch, self._val_form)
        dataset = dataset.take(steps)
        batches = self._data.num_val_batches()
        return dataset if batches is None else _of_length(dataset, batches)


def reading_first(step: Step) -> Step:
    """Return a Keras step that changes nothing if there is no further batch.

    Keras detects the end of a dataset that is empty or of unknown cardinality by one more call of
    the step. In that call, TensorFlow runs all operations that need no batch, such as a metric's
    ``count += 1``.
    """

    @functools.wraps(step)
    def read_first(data: Any) -> Any:
        with tf.control_dependencies(keras.tree.flatten(data)):
            return step(data)

    return read_first


@contextlib.contextmanager
def naming_data(step: str, data: Any) -> Iterator[None]:
    """Add the form of the step's argument to an error in the user's own step."""
    try:
        yield
    except Exception as error:
        if not isinstance(data, tuple) or len(data) == 1:
            raise  # Without labels a step gets only its inputs, as from fit(x).
        parts = ", ".join(("x", "y", "sample_weight")[: len(data)])
        error.add_note(f"{step}(data) is given data = ({parts}); its inputs alone are data[0].")
        raise


def _of_length(dataset: tf.data.Dataset, batches: int) -> tf.data.Dataset:
    return dataset.apply(tf.data.experimental.assert_cardinality(batches))


def column_dataset(
    chunks: Callable[[], Iterator[Chunk]],
    like: Chunk,
    rows: int | None = None,
    prefetch: int = 0,
    form: Form | None = None,
) -> tf.data.Dataset:
    """Return the batches of chunks as a dataset.

    Parameters
    ----------
    chunks : callable
        Returns the chunks of one iteration.
    like : Chunk
        A chunk with the same columns.
    rows : int, optional
        Rows of every batch, if all have the same number.
    prefetch : int
        Batches to prepare in advance, besides some MiB of rows that are not yet cut into batches.
    form : callable, optional
        Makes elements from the columns of several batches. Takes a dict of column name to tensor of
        shape ``(rows, *shape)``, and returns any structure of tensors with as many rows. Traced.
        Default: the dict itself.

    Returns
    -------
    tf.data.Dataset
        One element per batch.
    """
    layout = like.rows.layout

    def generate() -> Iterator[tuple[Any, ...]]:
        for chunk in chunks():
            made_progress()
            stop = 0
            for size, equal in itertools.groupby(chunk.sizes):
                count = len(list(equal))
                start, stop = stop, stop + count * size
                yield (count, size, *chunk.rows.slice(start, stop).blocks)

    # Their branches depend on structures alone. AutoGraph takes a second to rewrite them.
    @tf.autograph.experimental.do_not_convert
    def stacked(count: tf.Tensor, size: tf.Tensor, *blocks: tf.Tensor) -> Any:
        columns: dict[str, tf.Tensor] = {}
        for group, block in zip(layout.groups, blocks, strict=True):
            parts = [block] if len(group) == 1 else tf.unstack(tf.transpose(block))
            columns.update(zip(group, parts, strict=True))
        # Applied to all rows of the chunk, because a call per batch costs more than its work.
        structure = columns if form is None else form(columns)
        return keras.tree.map_structure(lambda tensor: stack(tensor, count, size), structure)

    def stack(tensor: tf.Tensor, count: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        shape = tensor.shape[1:]
        batches = tf.reshape(tensor, (count, size, *shape))
        return tf.ensure_shape(batches, (None, rows, *shape))

    @tf.autograph.experimental.do_not_convert
    def slices(*stack: Any) -> tf.data.Dataset:
        # A tuple arrives as several arguments, even a tuple of one structure.
        is_tuple = isinstance(stacks.element_spec, tuple)
        return tf.data.Dataset.from_tensor_slices(stack if is_tuple else stack[0])

    signature = (
        tf.TensorSpec((), tf.int64),
        tf.TensorSpec((), tf.int64),
        *(tf.TensorSpec((None, *block.shape[1:]), block.dtype) for block in like.rows.blocks),
    )
    stacks = tf.data.Dataset.from_generator(generate, output_signature=signature).map(stacked)
    # A thread prepares the next stack, so that waiting data are bounded by bytes. If tf.data
    # chose the number of batches instead, there could be hundreds of any size.
    dataset = stacks.prefetch(1).flat_map(slices)
    if prefetch:
        dataset = dataset.prefetch(prefetch)
    options = tf.data.Options()
    options.deterministic = True
    # Slices are too small to parallelize, and the model needs the cores.
    options.threading.max_intra_op_parallelism = 1
    options.threading.private_threadpool_size = 2
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)
