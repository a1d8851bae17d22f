"""The params of reading rows on the ranks. Runs on the driver."""

from __future__ import annotations

from hvd_estimators.exceptions import ParamError
from hvd_estimators.loading.batching import SHUFFLE_BUFFER_BYTES
from hvd_estimators.loading.readers import check_data_module
from hvd_estimators.params import DeclaredParams, boolean, declare, integer, one_of, text

__all__ = ["ReadingParams"]

_LEAST_BUFFER_BYTES = 2**20


class ReadingParams(DeclaredParams):
    """What reads the rows, in which order, and what it keeps."""

    shuffle_buffer_size = declare(
        "Bytes of rows that each rank holds for shuffling; as much again may go to row groups that "
        f"are read at the same time. Default: {SHUFFLE_BUFFER_BYTES}.",
        convert=integer(0),
        accessor="ShufflingBufferSize",
        aliases=["ShuffleBufferSize"],
    )
    shuffle = declare("Whether training rows come in random order.", default=True, convert=boolean)
    train_reader_num_workers = declare(
        "Readers that work in parallel.",
        default=2,
        convert=integer(1),
        accessor="TrainReaderNumWorker",
        aliases=["TrainReaderNumWorkers"],
    )
    val_reader_num_workers = declare(
        "Readers of validation rows that work in parallel.",
        default=2,
        convert=integer(1),
        accessor="ValReaderNumWorker",
        aliases=["ValReaderNumWorkers"],
    )
    reader_pool_type = declare(
        "How readers work in parallel: 'thread', 'process' or 'dummy' (not at all).",
        default="thread",
        convert=one_of("thread", "process", "dummy"),
    )
    inmemory_cache_all = declare(
        "Keep each rank's rows in memory after the first epoch.",
        default=False,
        convert=boolean,
        accessor="InMemoryCacheAll",
    )
    cache_type = declare(
        "'local-disk' keeps what is read from a remote store on the rank's disk, for the epochs "
        "that follow, and deletes it at the end. Petastorm only.",
        default="null",
        convert=one_of("null", "local-disk"),
    )
    cache_location = declare(
        "Directory, on every machine, of the disk cache. Default: that of temporary files.",
        convert=text,
    )
    cache_size_limit = declare(
        "Bytes, about, that each rank keeps in the disk cache.",
        default=10 * 2**30,
        convert=integer(1),
    )
    data_module = declare(
        "What reads the rows: 'petastorm', 'arrow', or a class derived from "
        "hvd_estimators.loading.readers.DataModule. Default: Petastorm where it can be imported, "
        "PyArrow otherwise.",
    )

    def _shuffle_buffer_bytes(self) -> int:
        given: int | None = self.getOrDefault("shuffle_buffer_size")
        return SHUFFLE_BUFFER_BYTES if given is None else given

    def _check_reading(self) -> None:
        """Make sure that there is something to read the rows with, and memory to shuffle them."""
        module = self.getOrDefault("data_module")
        check_data_module(module)
        if self.getOrDefault("cache_type") != "null" and module != "petastorm":
            raise ParamError(
                f"cache_type: only Petastorm caches on disk, found data_module={module!r}. Set "
                "data_module='petastorm', or leave cache_type out."
            )
        buffer_bytes = self._shuffle_buffer_bytes()
        if buffer_bytes < _LEAST_BUFFER_BYTES:
            raise ParamError(
                f"shuffle_buffer_size: expected bytes, {_LEAST_BUFFER_BYTES} or more, found "
                f"{buffer_bytes}, which may have been meant as rows. Set bytes, or leave it out "
                f"for {SHUFFLE_BUFFER_BYTES}; shuffle=False turns shuffling off."
            )
