"""Collectives for Keras ranks: their interface, and functions for tensors, numbers and statistics.

There are three implementations: Horovod's and torch's for Keras on TensorFlow, and one for Keras on
torch. `session` imports one of them when ranks connect. Everything else in this package calls the
functions of this module.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import keras
import numpy as np

from hvd_estimators.data.arrays import Array
from hvd_estimators.keras.backend import multiply_no_nan, on_tensorflow, ordered, to_dense
from hvd_estimators.keras.shard_state import updated_variables
from hvd_estimators.launch.gpus import check_gpus, describe_gpus, gpu_index, own_gpu
from hvd_estimators.training.collectives_choice import choose_collectives
from hvd_estimators.training.object_collectives import Bytes, ObjectExchange
from hvd_estimators.training.progress import notify_driver
from hvd_estimators.training.shard_state import ShardStates
from hvd_estimators.training.spec import array_digest

ops: Any = keras.ops


class Collectives(abc.ABC):
    """Interface between a Keras rank and the other ranks of its job.

    All ranks call the same methods in the same order. Tensors belong to Keras's backend. Names
    are the same on all ranks.

    Attributes
    ----------
    library : str
        The library's name in messages.
    rank, size, local_rank : int
        This rank's number, the number of ranks, and this rank's number on its machine.
    uses_nccl : bool
        Whether NCCL reduces on GPUs.
    """

    library: ClassVar[str]
    rank: int
    size: int
    local_rank: int
    uses_nccl: bool

    @abc.abstractmethod
    def sum(self, tensor: Any, name: str) -> Any:
        """Return the sum of a tensor over the ranks. Functions that are traced may call it."""

    @abc.abstractmethod
    def sum_array(self, array: Array, name: str) -> Array:
        """Return the sum of an array over the ranks."""

    @abc.abstractmethod
    def gather(self, document: Bytes, name: str) -> Bytes:
        """Return the concatenated bytes of all ranks, whose lengths may differ."""

    def naming_lost_peers(self) -> contextlib.AbstractContextManager[None]:
        """Raise the library's own error if an operation fails because a rank is lost."""
        return contextlib.nullcontext()


class _Active:
    """The collectives of this process."""

    collectives: Collectives | None = None


def current() -> Collectives:
    """Return the collectives of this rank.

    Outside of a `session`, in the user's own program, it connects to the other ranks, unless
    Horovod is initialized.
    """
    if _Active.collectives is not None:
        return _Active.collectives
    # Not kept: after a reset of Horovod's elastic training, rank and size are others.
    hvd = sys.modules.get("horovod.tensorflow")
    is_initialized = hvd is not None and hvd.is_initialized()
    kind = "horovod" if is_initialized else choose_collectives("auto", keras.backend.backend())[0]
    connected: Collectives = _implementation(kind).connect()
    return connected


@contextlib.contextmanager
def session(
    kind: str, mp_start_method: str | None = None, ranks: int | None = None, use_gpu: bool = True
) -> Iterator[Collectives]:
    """Connect this rank to the others for the duration of the block. Called by all ranks.

    See `hvd_estimators.torch.collectives.session` for the parameters.
    """
    connected = _implementation(kind).connected(kind, mp_start_method, ranks, use_gpu)
    before = _Active.collectives
    with connected as _Active.collectives:
        try:
            with _Active.collectives.naming_lost_peers():
                yield _Active.collectives
        finally:
            _Active.collectives = before


def _implementation(kind: str) -> Any:
    is_horovods = kind == "horovod" and on_tensorflow()
    name = "horovod_collectives" if is_horovods else "torch_collectives"
    return importlib.import_module(f"{__package__}.{name}")


exchange = ObjectExchange(
    lambda: current().rank,
    lambda: current().size,
    lambda document, name: current().gather(document, name),
)


def choose_devices(use_gpu: bool, verbose: int = 1) -> contextlib.AbstractContextManager[Any]:
    """Choose the rank's device, and return a context that uses it.

    On TensorFlow, at most one GPU is visible, and threads are limited to the rank's cores.

    Parameters
    ----------
    use_gpu : bool
        Whether to use GPUs.
    verbose : int
        If 1 or above, rank 0 reports the GPUs of all ranks to the driver.

    Raises
    ------
    GpuError
        If only some ranks see a GPU, or if two ranks share a GPU although NCCL reduces.
    """
    if not on_tensorflow():
        from hvd_estimators.torch.collectives import choose_device

        return keras.device(str(choose_device(use_gpu, verbose)))
    import tensorflow as tf

    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit():
        # TensorFlow raises if it has started already.
        with contextlib.suppress(RuntimeError):
            tf.config.threading.set_intra_op_parallelism_threads(int(threads))
    gpus = tf.config.list_physical_devices("GPU") if use_gpu else []
    index = gpu_index(len(gpus), current().local_rank)
    chosen = [] if index is None else [gpus[index]]
    # Before the first exchange, with which TensorFlow takes what it sees.
    tf.config.set_visible_devices(chosen, "GPU")
    for gpu in chosen:
        tf.config.experimental.set_memory_growth(gpu, True)
    used = exchange.gather(None if index is None else own_gpu(index), "hvd_estimators.gpus")
    check_gpus([gpu is not None for gpu in used])
    if index is None:
        return contextlib.nullcontext()
    kind = tf.config.experimental.get_device_details(gpus[index]).get("device_name", "GPU")
    line = describe_gpus(used, str(kind), current().uses_nccl)
    if current().rank == 0:
        notify_driver(f"{line} Collectives: {current().library}.", verbose)
    return contextlib.nullcontext()


_BUCKET_BYTES = 16 * 2**20


class GradientAverager:
    """Replace the gradients of a rank by their weighted mean over all ranks.

    Gradients are reduced in buckets of one dtype, one bucket after the other. Each bucket is a
    single tensor of the same gradients in the same order in every run. The rounding of sums
    therefore never depends on timing, as it would if Horovod fused tensors by chance.

    The weight of the rank's batch is part of the first bucket, to save a separate reduction. A
    separate reduction is needed only if gradients are compressed or that bucket is not float32.

    Parameters
    ----------
    compression : horovod compressor, optional
        For example ``horovod.tensorflow.Compression.fp16``.
    name : str
        Distinguishes this averager's tensors from others'.

    Attributes
    ----------
    weight : tf.Tensor or None
        Weight of the current batch; None if the batches of all ranks have the same weight.
    applied : int
        Number of calls of the optimizer for the batch.
    """

    def __init__(self, compression: Any = None, name: str = "gradients") -> None:
        self._compression = compression
        self._name = name
        self.weight: Any = None
        self.applied = 0

    def weigh(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Multiply gradients by the weight of the batch.

        Parameters
        ----------
        gradients : sequence of tensor, tf.IndexedSlices or None
            One per variable; None stays None.
        variables : sequence of keras.Variable
            Their shapes become the static shapes of the result.
        """
        self.applied += 1
        dense = [_dense(g, v) for g, v in zip(gradients, variables, strict=True)]
        if self.weight is None:
            return dense
        return [
            # The gradient of a batch without rows may be NaN, and its weight is 0.
            None if g is None else multiply_no_nan(g, ops.cast(self.weight, g.dtype))
            for g in dense
        ]

    def average(self, weighted: Sequence[Any], weight: Any) -> list[Any]:
        """Return the sum of the ranks' weighted gradients, divided by the sum of their weights.

        Parameters
        ----------
        weighted : sequence of tensor or None
            This rank's gradients times its weight.
        weight : tensor or float
            This rank's weight.
        """
        types = [None if g is None else _type_of(g) for g in weighted]
        # Horovod does not support bfloat16, and sums in bfloat16 would be imprecise.
        weighted = [
            ops.cast(g, "float32") if t == "bfloat16" else g
            for g, t in zip(weighted, types, strict=True)
        ]
        result = list(weighted)
        weight = ops.cast(weight, "float32")
        buckets = list(_buckets(weighted))
        if current().size == 1:
            result = [None if g is None else _divide(g, weight) for g in weighted]
            return _of_types(result, types)
        # Half precision would round the weight: it must be at least as exact as the gradients.
        found = {_type_of(weighted[bucket[0]]) for bucket in buckets}
        alone = self._compression is not None or found != {"float32"}
        total = sum_tensors(weight, f"{self._name}.weight") if alone else None
        for number, bucket in enumerate(buckets):
            parts = [ops.reshape(weighted[index], (-1,)) for index in bucket]
            if total is None and not number:
                parts.append(ops.reshape(weight, (1,)))
            # One bucket after the other, so that Horovod does not fuse the buckets.
            with ordered([] if not number else [result[buckets[number - 1][0]]]):
                flat = ops.concatenate(parts, axis=0)
                if alone:
                    # Divided before the reduction, so that sums in half precision do not overflow.
                    flat = _divide(flat, total)
                if self._compression is None:
                    flat = sum_tensors(flat, f"{self._name}.{number}")
                else:
                    packed, context = self._compression.compress(flat)
                    packed = sum_tensors(packed, f"{self._name}.{number}")
                    flat = self._compression.decompress(packed, context)
            if not alone:
                if total is None:
                    flat, total = flat[:-1], flat[-1]
                flat = _divide(flat, total)
            stops = np.cumsum([_size(weighted[index]) for index in bucket])[:-1].tolist()
            split = ops.split(flat, stops) if stops else [flat]
            for index, part in zip(bucket, split, strict=True):
                result[index] = ops.reshape(part, weighted[index].shape)
        return _of_types(result, types)


def _dense(gradient: Any, variable: Any) -> Any:
    """Convert a gradient to one tensor with the static shape of its variable."""
    # TensorFlow infers only part of the shape for products with more than two dimensions.
    return None if gradient is None else ops.reshape(to_dense(gradient), variable.shape)


def _type_of(tensor: Any) -> str:
    return str(keras.backend.standardize_dtype(tensor.dtype))


def _size(tensor: Any) -> int:
    return int(np.prod(tensor.shape))


def _buckets(gradients: Sequence[Any]) -> Iterator[list[int]]:
    """Yield the positions of each bucket, last gradients first: they are computed first."""
    open_buckets: dict[str, list[int]] = {}
    capacity: dict[str, int] = {}
    for index in reversed(range(len(gradients))):
        gradient = gradients[index]
        if gradient is None:
            continue
        dtype = _type_of(gradient)
        if dtype in open_buckets and capacity[dtype] <= 0:
            yield open_buckets.pop(dtype)
        if dtype not in open_buckets:
            open_buckets[dtype], capacity[dtype] = [], _BUCKET_BYTES
        open_buckets[dtype].append(index)
        capacity[dtype] -= _size(gradient) * np.dtype(dtype).itemsize
    yield from open_buckets.values()


def _of_types(tensors: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    return [
        None if tensor is None else ops.cast(tensor, dtype)
        for tensor, dtype in zip(tensors, types, strict=True)
    ]


def _divide(tensor: Any, divisor: Any) -> Any:
    # All batches of a step may have weight 0.
    return ops.divide_no_nan(tensor, ops.cast(divisor, tensor.dtype))


def sum_tensors(tensor: Any, name: str) -> Any:
    """Sum a tensor over the ranks; Horovod matches the ranks' tensors by name."""
    return current().sum(tensor, f"hvd_estimators.{name}")


def sum_arrays(arrays: Sequence[Array], name: str) -> list[Array]:
    """Sum arrays of numbers over the ranks, in 64 bits and in one reduction."""
    if not arrays:
        return []
    flat = np.concatenate([np.asarray(array, np.float64).reshape(-1) for array in arrays])
    if current().size > 1:
        flat = current().sum_array(flat, f"hvd_estimators.{name}")
    stops = np.cumsum([np.size(array) for array in arrays])[:-1]
    return [
        part.reshape(np.shape(array))
        for part, array in zip(np.split(flat, stops), arrays, strict=True)
    ]


def sum_number(value: float, name: str) -> float:
    """Sum a number over the ranks, in 64 bits."""
    (total,) = sum_arrays([np.array(value)], name)
    return float(total)


def broadcast_variables(variables: Sequence[Any], root_rank: int = 0) -> None:
    """Set Keras variables to the values of one rank."""
    ranks = current()
    for index, variable in enumerate(variables if ranks.size > 1 else ()):
        value = keras.ops.convert_to_numpy(variable.value)
        own = np.frombuffer(value.tobytes() if ranks.rank == root_rank else b"", np.uint8)
        received = ranks.gather(own, f"hvd_estimators.broadcast.{index}")
        variable.assign(received.view(value.dtype).reshape(value.shape))


class StatisticsAverager:
    """Average the variables that layers compute during training over the shards.

    These are moving statistics of batch normalization, and other non-trainable float variables that
    have changed.

    Parameters
    ----------
    model : keras.Model
        The built model, the same on all ranks.
    num_shards : int
        Number of canonical shards; a single one needs no averages.

    Attributes
    ----------
    digests : list of bytes
        Digests of the variables at the start of the epoch, to detect changes.
    """

    def __init__(self, model: keras.Model, num_shards: int) -> None:
        self._variables = [
            variable
            for variable in (updated_variables(model) if num_shards > 1 else ())
            if keras.backend.is_float_dtype(variable.dtype)
        ]
        self.digests = [array_digest(variable.numpy()) for variable in self._variables]

    def average(self, shards: ShardStates) -> None:
        """Average over the shards that the ranks run. Called by all ranks at the same time."""
        if not self._variables:
            return
        changed = [0.0] * len(self._variables)

        def look(_: int) -> None:
            for index, before in enumerate(self.digests):
                changed[index] += float(array_digest(self._variables[index].numpy()) != before)

        shards.for_each(look)
        # A variable that changed on any rank is averaged on all ranks. Frozen layers do not change.
        (changes,) = sum_arrays([np.array(changed)], "statistics_changed")
        moved = [v for v, count in zip(self._variables, changes, strict=True) if count]
        own: list[Any] = [0.0] * len(moved)

        def add(_: int) -> None:
            for index, variable in enumerate(moved):
                own[index] = own[index] + np.asarray(variable.numpy(), np.float64)

        shards.for_each(add)
        totals = sum_arrays(own, "statistics")

        def set_mean(_: int) -> None:
            for variable, total in zip(moved, totals, strict=True):
                variable.assign(total / shards.num_shards)

        shards.for_each(set_mean)
