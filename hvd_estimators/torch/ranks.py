"""What torch ranks agree on: their device, sums of numbers, and a digest of the weights."""

from __future__ import annotations

import hashlib

import horovod.torch as hvd
import torch

from hvd_estimators.torch.objects import gather_numbers
from hvd_estimators.training.rank import check_gpus

__all__ = ["choose_device", "sum_over_ranks", "weights_digest"]


def choose_device(use_gpu: bool) -> torch.device:
    """Return this rank's GPU, or the CPU if no rank has a GPU. Called by all ranks.

    Raises
    ------
    RuntimeError
        If some ranks have a GPU and others have none.
    """
    available = gather_numbers(use_gpu and torch.cuda.is_available(), "cuda")
    if not check_gpus([bool(has_gpu) for has_gpu in available]):
        return torch.device("cpu")
    # Pinned ranks see one GPU; others choose by their local rank.
    index = hvd.local_rank() % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def sum_over_ranks(value: float) -> float:
    """Add up a number of each rank, exactly in 64 bits. Called by all ranks."""
    own = torch.tensor([value], dtype=torch.float64)
    return float(hvd.allreduce(own, name="step_weight", op=hvd.Sum))


def weights_digest(module: torch.nn.Module) -> str:
    """Return a digest of a module's parameters, which is equal if all their bits are."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
