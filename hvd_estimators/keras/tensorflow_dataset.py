"""Batches of columns as ``tf.data`` datasets. Runs on the ranks.

Rows cross from NumPy to TensorFlow in chunks of many batches (`Chunk`), some MiB at a time.
TensorFlow then splits the chunks into columns, stacks the columns by batch, and slices the stacks.
So neither Python code nor a traced function runs once per batch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from hvd_estimators.data.arrays import Columns
from hvd_estimators.launch.rank.hang_detection import made_progress
from hvd_estimators.loading.shuffle import Chunk

Form = Callable[[dict[str, tf.Tensor]], Any]
Step = Callable[[Any], Any]

Batches = Chunk | Columns
"""Batches of rows of one length, or one batch of rows of any length."""


def train_dataset(
    chunks: Iterator[Batches], like: Batches, prefetch: int, form: Form | None, skipped: int
) -> tf.data.Dataset:
    """Return the batches of chunks, which can be iterated only once.

    Steps read their own batches, so that ``skipped`` ones need none. See `column_dataset`.
    """
    dataset = column_dataset(lambda: chunks, like, prefetch, form)
    return _of_length(dataset, tf.data.INFINITE_CARDINALITY)


def validation_dataset(
    chunks: Callable[[], Iterator[Batches]],
    like: Batches,
    prefetch: int,
    form: Form | None,
    steps: int,
    batches: int | None,
) -> tf.data.Dataset:
    """Return at most ``steps`` batches, of ``batches`` if known. See `column_dataset`."""
    dataset = column_dataset(chunks, like, prefetch, form).take(steps)
    return dataset if batches is None else _of_length(dataset, batches)


def first(like: Batches, form: Form | None) -> Any:
    """Return the first batch of a chunk."""
    return next(iter(column_dataset(lambda: iter([like]), like, form=form)))


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


def _of_length(dataset: tf.data.Dataset, batches: int) -> tf.data.Dataset:
    return dataset.apply(tf.data.experimental.assert_cardinality(batches))


def column_dataset(
    chunks: Callable[[], Iterator[Any]], like: Batches, prefetch: int = 0, form: Form | None = None
) -> tf.data.Dataset:
    """Return the batches of chunks as a dataset.

    Parameters
    ----------
    chunks : callable
        Returns the chunks of one iteration.
    like : Chunk or mapping
        A chunk or batch with the same columns.
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
    if isinstance(like, Chunk):
        dataset = _cut(chunks, like, form)
    else:
        dataset = _one_by_one(chunks, like, form)
    if prefetch:
        dataset = dataset.prefetch(prefetch)
    options = tf.data.Options()
    options.deterministic = True
    # Slices are too small to parallelize, and the model needs the cores.
    options.threading.max_intra_op_parallelism = 1
    options.threading.private_threadpool_size = 2
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def _one_by_one(
    batches: Callable[[], Iterator[Columns]], like: Columns, form: Form | None
) -> tf.data.Dataset:
    """Return batches of rows of any length; the last one made waits for its use."""
    signature = {
        name: tf.TensorSpec(
            (None,) * array.ndim, tf.string if array.dtype == object else array.dtype
        )
        for name, array in like.items()
    }

    def generate() -> Iterator[Columns]:
        for batch in batches():
            made_progress()
            yield batch

    dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
    return (dataset if form is None else dataset.map(form)).prefetch(1)


def _cut(chunks: Callable[[], Iterator[Chunk]], like: Chunk, form: Form | None) -> tf.data.Dataset:
    """Return the batches of chunks, which TensorFlow cuts."""
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
        return tf.ensure_shape(batches, (None, None, *shape))

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
    return stacks.prefetch(1).flat_map(slices)
