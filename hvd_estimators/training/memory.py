"""Memory that a torch model needs on each rank, computed before a launch.

A rank holds the parameters, a gradient for each that trains, and the optimizer's states. For Adam,
S. Rajbhandari et al. (https://arxiv.org/abs/1910.02054, section 3.1) count 2 + 2 + 12 bytes per
parameter in mixed precision. Here all are 32-bit floats: 4 + 4 + 8 bytes. Activations need further
memory, which grows with the batch.
"""

from __future__ import annotations

STATES = {"SGD": 0, "SGD, momentum": 1, "Adam, AdamW": 2}
"""Numbers per trained parameter that an optimizer keeps."""

_NUMBER_BYTES = 4


def rank_bytes(
    parameters: int, trained: int, states: float, ranks: int = 1, gathered: int | None = None
) -> int:
    """Return the bytes of parameters, gradients and optimizer on each rank.

    Parameters
    ----------
    parameters : int
        Bytes of all parameters.
    trained : int
        Bytes of those that train.
    states : float
        Numbers per trained parameter that the optimizer keeps, such as in `STATES`.
    ranks : int
        Number of ranks.
    gathered : int or None
        With sharding, the bytes of parameters that are gathered at the same time. None: no
        sharding.
    """
    held = parameters + round(trained * (1 + states))
    return held if gathered is None or ranks == 1 else -(-held // ranks) + gathered


def describe_memory(parameters: int, ranks: int) -> str:
    """Return a table of memory by ``sharding`` and optimizer, for a number of parameters."""
    size = parameters * _NUMBER_BYTES
    lines = [
        f"GB on each of {ranks} processes, for {parameters:,} parameters of 32 bits, all trained:",
        f"{'':24}" + "".join(f"{name:>16}" for name in STATES),
    ]
    for sharding, gathered in (("none", None), ("optimizer", size), ("full", 0)):
        found = (rank_bytes(size, size, states, ranks, gathered) for states in STATES.values())
        row = "".join(f"{value / 1e9:16,.1f}" for value in found)
        lines.append(f"{f'sharding={sharding!r}':24}{row}")
    more = "Activations need more, and sharding='full' the layers that compute."
    return "\n".join([*lines, f"{more} Frozen parameters need 4 bytes each."])
