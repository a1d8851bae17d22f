"""Factory of data modules, virtual shards, and checks of user-defined data modules."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from hvd_estimators._util.install_hints import INSTALL
from hvd_estimators.exceptions import DataError, DependencyError, ParamError
from hvd_estimators.loading.blocks import BufferPool
from hvd_estimators.loading.plan import virtual_shards
from hvd_estimators.loading.reader import ChunkedDataModule, DataModule, PlannedDataModule
from hvd_estimators.loading.shuffle import Chunk

if TYPE_CHECKING:
    from hvd_estimators.loading.spec import DataSpec

__all__ = [
    "CheckedDataModule",
    "DataModule",
    "VirtualShards",
    "check_data_module",
    "check_shards",
    "open_data_module",
    "reads_several",
]


class CheckedDataModule(ChunkedDataModule):
    """Wrap a user's data module and raise an error if it ends too early.

    Otherwise, training would continue without rows or wait for the other ranks, and the mean over
    no rows would be nan.

    Parameters
    ----------
    module : DataModule
        The user's data module.
    rank : int
        This rank.
    steps : int
        Training batches of an epoch on each rank.
    skip_steps : int
        Training batches of an earlier part of the run.
    has_val_rows : bool
        Whether the rank has validation rows.
    """

    def __init__(
        self, module: DataModule, *, rank: int, steps: int, skip_steps: int, has_val_rows: bool
    ) -> None:
        self.module = module
        self._rank = rank
        self._steps = steps
        self._skip_steps = skip_steps
        self._has_val_rows = has_val_rows
        self._val_batches = 0

    def __enter__(self) -> Self:
        self.module.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Exit the user's data module."""
        self.module.__exit__(exc_type, exc, traceback)

    def train_chunks(self) -> Iterator[Chunk]:
        """Return the training batches in chunks; raise `DataError` if they end."""
        delivered = 0
        for chunk in self.module.train_chunks():
            delivered += len(chunk.sizes)
            yield chunk
        epoch, of_epoch = divmod(self._skip_steps + delivered, self._steps)
        raise DataError(
            f"Rank {self._rank}, epoch {epoch} (the first is 0): {self._name}.train_data() ended "
            f"after {of_epoch} of {self._steps} batches ({delivered} in all). Let it go on without "
            "end, pass after pass, or set train_steps_per_epoch to the batches that every rank has."
        )

    def val_chunks(self) -> Iterator[Chunk]:
        """Return the validation batches of one pass; raise `DataError` if there are too few."""
        delivered = 0
        for chunk in self.module.val_chunks():
            delivered += len(chunk.sizes)
            yield chunk
        wanted = max(self._val_batches, int(self._has_val_rows))
        if delivered < wanted:
            raise DataError(
                f"Rank {self._rank}: {self._name}.val_data() ended after {delivered} batches; "
                f"expected {wanted} at least"
                f"{', as in the passes before' if self._val_batches else ''}. Return a new "
                "iterator over the validation rows each time."
            )
        self._val_batches = delivered

    def global_train_sizes(self) -> Iterator[int] | None:
        """Return the sizes that the user's data module reports."""
        return self.module.global_train_sizes()

    @property
    def _name(self) -> str:
        return type(self.module).__name__


class VirtualShards(ChunkedDataModule):
    """Batches of a rank that runs several virtual shards, one after another in each step.

    A rank with one shard fewer than others gets an empty micro-batch in each step, so that all
    ranks have the same number of micro-batches. Each shard has its own reader. Its row order is
    therefore the same as on its own rank.

    Parameters
    ----------
    modules : sequence of PlannedDataModule
        One reader per shard of the rank.
    size : int
        Number of ranks.
    """

    def __init__(self, modules: Sequence[PlannedDataModule], size: int) -> None:
        self.modules = modules
        self._size = size
        self._num_shards = modules[0].train_plan.num_shards
        self._passes = -(-self._num_shards // size)
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Self:
        for module in self.modules:
            self._opened.enter_context(module)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close all readers."""
        self._opened.__exit__(exc_type, exc, traceback)

    def train_chunks(self) -> Generator[Chunk, None, None]:
        """Return the training batches, each in its own chunk."""
        idle = self._passes - len(self.modules)
        with contextlib.ExitStack() as stack:
            shards = [
                stack.enter_context(contextlib.closing(_one_by_one(module.train_chunks())))
                for module in self.modules
            ]
            for chunks in zip(*shards, strict=True):
                yield from chunks
                for _ in range(idle):
                    yield Chunk(chunks[0].rows.slice(0, 0), (0,))

    def val_chunks(self) -> Generator[Chunk, None, None]:
        """Return the validation batches of one pass, shard after shard, without empty ones."""
        for module in self.modules:
            with contextlib.closing(_one_by_one(module.val_chunks())) as chunks:
                yield from itertools.islice(chunks, module.steps_per_epoch_val)

    def num_val_batches(self) -> int:
        """Return the number of validation batches in a pass over all shards."""
        return sum(module.num_val_batches() for module in self.modules)

    def global_train_sizes(self) -> Iterator[int]:
        """Return an infinite iterator of the number of rows in each batch over all ranks."""
        first = self.modules[0]
        sizes = [
            first.train_plan.sizes_of(
                range(start, min(start + self._size, self._num_shards)), first.train_batch_size
            )
            for start in range(0, self._num_shards, self._size)
        ]
        for step in itertools.count(first.skip_train_steps):
            yield from (of_pass[step % len(of_pass)] for of_pass in sizes)


def _one_by_one(chunks: Iterator[Chunk]) -> Generator[Chunk, None, None]:
    """Yield each batch as a chunk."""
    for chunk in chunks:
        start = 0
        for size in chunk.sizes:
            yield Chunk(chunk.rows.slice(start, start + size), (size,))
            start += size


def check_data_module(data_module: str | type[DataModule] | None) -> None:
    """Check that a data module can be created. Runs on the driver.

    Raises
    ------
    ParamError
        If it is neither a known name nor a subclass of `DataModule`.
    DependencyError
        If it needs a package that is not installed.
    """
    if isinstance(data_module, type) and issubclass(data_module, DataModule):
        return
    if data_module is None or data_module == "arrow":
        return
    if data_module != "petastorm":
        raise ParamError(
            "data_module: expected 'petastorm', 'arrow' or a class derived from "
            f"hvd_estimators.loading.readers.DataModule, found {data_module!r}."
        )
    if importlib.util.find_spec("petastorm") is None:
        raise DependencyError(
            "data_module='petastorm' needs Petastorm, which is not installed. Set "
            f"data_module='arrow', which reads the same files, or run: {INSTALL['petastorm']}"
        )


def check_shards(
    data_module: str | type[Any] | None, num_shards: int, num_ranks: int, run_id: str | None
) -> None:
    """Check that the given number of ranks can run a run's shards. Runs on the driver.

    Parameters
    ----------
    data_module : str, type or None
        Name or class of the data module.
    num_shards, num_ranks : int
        Number of the run's canonical shards, and number of ranks.
    run_id : str or None
        The run, for messages.

    Raises
    ------
    ParamError
        If there are more ranks than shards. Also if there are fewer ranks than shards and the data
        module is user-defined, because it reads only one shard per rank.
    """
    if num_ranks > num_shards:
        raise ParamError(
            f"num_proc: the run {run_id!r} began with {num_shards} ranks, which share out each "
            f"global batch, and cannot go on with more, found {num_ranks}. Set num_proc to "
            f"{num_shards} or less, or another run_id."
        )
    if num_ranks < num_shards and not reads_several(data_module):
        raise ParamError(
            f"data_module: the run {run_id!r} began with {num_shards} ranks, and with {num_ranks} "
            f"some have to read for two. {data_module!r} reads for one: only data modules of this "
            f"package can read for several. Set num_proc={num_shards}, or another run_id."
        )


def reads_several(data_module: str | type[Any] | None) -> bool:
    """Return whether a rank can read several shards; False for user-defined data modules."""
    return not isinstance(data_module, type) or issubclass(data_module, PlannedDataModule)


def open_data_module(
    data: DataSpec,
    rank: int,
    size: int,
    *,
    epoch: int,
    rows: int = 0,
    epochs: int,
    memory: BufferPool | None = None,
) -> DataModule:
    """Create a rank's data module. Runs on ranks.

    Parameters
    ----------
    data : DataSpec
        The data of the job.
    rank, size : int
        This rank and the number of ranks.
    epoch : int
        The first epoch to train.
    rows : int
        Rows of that epoch, over all shards, that were already trained on; see
        `DataSpec.rows_after`.
    epochs : int
        Number of remaining epochs, including the first one.
    memory : BufferPool, optional
        Allocates the batches; not used by user-defined data modules.

    Returns
    -------
    DataModule
        With as many ranks as shards, a data module with one batch per step. With fewer ranks, a
        `VirtualShards` with several micro-batches per step. A user-defined data module is wrapped
        in a `CheckedDataModule`.

    Raises
    ------
    ValueError
        If no step ends after ``rows`` rows.
    ParamError
        See `check_shards`.
    """
    skip_steps = epoch * data.train_steps_per_epoch + data.batches_before(epoch, rows)
    if size == data.num_shards:
        return _open_shard(data, rank, skip_steps, epochs, memory)
    check_shards(data.data_module, data.num_shards, size, None)
    shards = virtual_shards(data.num_shards, rank, size)
    workers = {
        name: max(getattr(data.options, name) // len(shards), 1)
        for name in ("train_reader_worker_count", "val_reader_worker_count")
    }
    data = replace(data, options=replace(data.options, **workers))
    opened = [_open_shard(data, shard, skip_steps, epochs, memory) for shard in shards]
    modules = [module for module in opened if isinstance(module, PlannedDataModule)]
    for module in modules:
        module.footers = modules[0].footers
    return VirtualShards(modules, size)


def _open_shard(
    data: DataSpec, shard: int, skip_steps: int, epochs: int, memory: BufferPool | None
) -> DataModule:
    """Create the data module of one shard, without the first steps of the run."""
    module = _module_class(data.data_module)(
        train_dir=data.train_path,
        val_dir=data.val_path,
        num_train_epochs=epochs,
        has_val=data.val_plan is not None,
        train_batch_size=data.batch_size,
        val_batch_size=data.val_batch_size,
        cur_shard=shard,
        shard_count=data.num_shards,
        schema_fields=[column.name for column in data.columns],
        steps_per_epoch_train=data.train_steps_per_epoch,
        steps_per_epoch_val=data.validation_steps_per_epoch,
        columns=data.columns,
        train_plan=data.train_plan,
        val_plan=data.val_plan,
        random_seed=data.random_seed,
        skip_train_steps=skip_steps,
        label_cols=data.label_cols,
        **data.options.as_arguments(),
    )
    if isinstance(module, PlannedDataModule):
        module.memory = memory or module.memory
        return module
    return CheckedDataModule(
        module,
        rank=shard,
        steps=data.train_steps_per_epoch,
        skip_steps=skip_steps,
        has_val_rows=data.val_plan is not None and data.val_plan.rows(shard) > 0,
    )


def _module_class(data_module: str | type[DataModule] | None) -> type[DataModule]:
    if isinstance(data_module, type):
        return data_module
    if data_module != "arrow":
        try:
            from hvd_estimators.loading.petastorm import PetastormDataModule
        except ImportError:
            # Importing an installed Petastorm can fail with current versions of PyArrow.
            if data_module is not None:
                raise
        else:
            return PetastormDataModule
    from hvd_estimators.loading.arrow import ArrowDataModule

    return ArrowDataModule
