"""Collectives of torch ranks over Horovod."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch

from hvd_estimators.torch.collectives import Collectives
from hvd_estimators.training.collectives_choice import require_horovod
from hvd_estimators.training.horovod_session import horovod_session


class HorovodCollectives(Collectives):
    """Collectives over Horovod, which agrees on the order of operations by their names.

    Horovod must be initialized.
    """

    library = "Horovod"

    def __init__(self) -> None:
        import horovod.torch

        self._hvd = hvd = horovod.torch
        self._ops = {"mean": hvd.Average, "sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}
        self.rank, self.size = hvd.rank(), hvd.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self.node_rank = hvd.cross_rank()
        self.uses_nccl = bool(hvd.nccl_built())

    def reduce(self, tensor: torch.Tensor, op: str, name: str | None = None) -> torch.Tensor:
        """Return a tensor's reduction over the ranks."""
        reduced: torch.Tensor = self._hvd.allreduce(tensor, name=name, op=self._ops[op])
        return reduced

    def reduce_async(self, tensor: torch.Tensor, op: str, name: str) -> Callable[[], torch.Tensor]:
        """Start the reduction of a tensor, in place."""
        handle = self._hvd.allreduce_async_(tensor, name=name, op=self._ops[op])
        return lambda: self._hvd.synchronize(handle)

    def average_sparse_async(self, tensor: torch.Tensor, name: str) -> Callable[[], torch.Tensor]:
        """Start the average of a sparse tensor."""
        wait: Callable[[], torch.Tensor]
        wait = self._hvd.sparse_allreduce_async(tensor, name, self._hvd.Average)
        return wait

    def gather(self, tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
        """Return the ranks' tensors, concatenated along their first dimension."""
        gathered: torch.Tensor = self._hvd.allgather(tensor, name=name)
        return gathered

    def broadcast(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite tensors with rank 0's."""
        self._hvd.broadcast_parameters(tensors, root_rank=0)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._hvd.barrier()


@contextlib.contextmanager
def connected(
    mp_start_method: str | None, ranks: int | None, use_gpu: bool
) -> Iterator[HorovodCollectives]:
    """Initialise Horovod for the duration of the block; see `horovod_session`."""
    require_horovod("torch")
    import horovod.torch

    from hvd_estimators.torch.horovod_group import make_default_group

    with horovod_session(horovod.torch, mp_start_method, ranks):
        destroy = make_default_group(horovod.torch)
        yield HorovodCollectives()
        # After an error, its operations end with Horovod.
        destroy()


def connect() -> HorovodCollectives:
    """Initialise Horovod until this process ends, unless it is initialized."""
    import horovod.torch

    from hvd_estimators.torch.horovod_group import make_default_group

    horovod.torch.init()
    make_default_group(horovod.torch)
    return HorovodCollectives()
