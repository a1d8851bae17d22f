"""The states of a torch rank's random streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvd_estimators.training.randomness import HostStreams

__all__ = ["TorchStreams"]


class TorchStreams(HostStreams):
    """Python's, NumPy's and torch's global generators, that of the rank's device included.

    Parameters
    ----------
    device : torch.device
        The device that the rank trains on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def capture(self) -> dict[str, Any]:
        """Return the states, as plain values that a checkpoint keeps."""
        state = {**super().capture(), "torch": torch.get_rng_state().numpy()}
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device).numpy()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the states that `capture` returned; a run may go on on another kind of device."""
        super().restore(state)
        torch.set_rng_state(torch.from_numpy(state["torch"]))
        if self._device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(torch.from_numpy(state["cuda"]), self._device)
