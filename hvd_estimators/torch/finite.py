"""Which losses and parameters are NaN or infinite on a torch rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["not_finite"]


def not_finite(
    module: torch.nn.Module, losses: Iterable[torch.Tensor | None]
) -> tuple[float | None, list[str]]:
    """Return a loss that is NaN or infinite, if any, and the names of such parameters.

    Reads each parameter once, and waits for a GPU once where all is well.

    Parameters
    ----------
    module : torch.nn.Module
        Its parameters are looked at.
    losses : iterable of torch.Tensor or None
        Scalars.
    """
    given = [loss for loss in losses if loss is not None]
    sums = [_sum(tensor.detach()) for tensor in (*given, *module.parameters())]
    if not sums or bool(torch.isfinite(torch.stack(sums)).all()):
        return None, []
    # A sum may overflow where none of the values is infinite.
    loss = next((float(loss) for loss in given if not torch.isfinite(loss).all()), None)
    named = module.named_parameters()
    return loss, [name for name, value in named if not bool(torch.isfinite(value).all())]


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum that is finite only if all values are."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point() and tensor.element_size() < 4:
        return tensor.sum(dtype=torch.float32).double()
    return tensor.sum().double()
