"""Per-shard state of a Keras rank: random streams and statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

# There is no public access to the generator that keras.random uses when no seed is given.
from keras.src.random.seed_generator import global_seed_generator

from hvd_estimators.keras.backend import all_layers, is_keras, on_tensorflow, torch_layers
from hvd_estimators.training.horovod_session import rank_seed, seed_rank
from hvd_estimators.training.shard_state import HostStreams, ShardStates

if not on_tensorflow():
    import torch


class RandomStreams(HostStreams):
    """Independent random streams for each shard and epoch, for all generators.

    The generators are the layers', the global one of `keras.random`, and Python's, NumPy's and
    torch's. The numbers of an epoch depend only on the run's seed, the shard and the epoch. A
    resumed run therefore draws the same numbers as an uninterrupted run. The exception is
    ``tf.random``, whose functions and generators return other numbers in a resumed run.

    Parameters
    ----------
    model : keras.Model
        Its generators have the same states on all ranks, and each time that the run is resumed.
    seed : int
        Seed of the run.
    shard : int
        The shard that the rank runs, or its first virtual shard.
    first_epoch : int
        The epoch in which the run starts or resumes.
    rows : int
        Number of rows of that epoch that are already trained on.
    """

    def __init__(
        self, model: keras.Model, seed: int, shard: int, first_epoch: int = 0, rows: int = 0
    ) -> None:
        self._seed = seed
        # Generators with the same seed draw the same numbers, as in one process.
        self._states = [(state, state.numpy().tolist()) for state in seed_states(model)]
        self._states.append((global_seed_generator().state, [0, 0]))
        own = seed_rank(seed, shard, first_epoch)
        if on_tensorflow():
            import tensorflow as tf

            # The seed applies to functions that are traced later. Setting the seed in a later epoch
            # would make these functions repeat their numbers.
            tf.random.set_seed(_mixed(own, [rows])[0])

    def begin(self, shard: int, epoch: int) -> None:
        """Start a shard's streams for an epoch."""
        own = seed_rank(self._seed, shard, epoch)
        for state, given in self._states:
            state.assign(_mixed(own, given))
        if not on_tensorflow():
            torch.manual_seed(own)

    def capture(self) -> dict[str, Any]:
        """Return the states as plain values for a checkpoint."""
        return {
            **super().capture(),
            "keras": [state.numpy() for state, _ in self._states],
            **({} if on_tensorflow() else {"torch": torch.get_rng_state().numpy()}),
            **({"cuda": torch.cuda.get_rng_state().numpy()} if _draws_on_cuda() else {}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the states that `capture` returned."""
        super().restore(state)
        for (variable, _), value in zip(self._states, state["keras"], strict=True):
            variable.assign(value)
        if not on_tensorflow():
            torch.set_rng_state(torch.from_numpy(np.array(state["torch"])))
        if "cuda" in state and _draws_on_cuda():
            torch.cuda.set_rng_state(torch.from_numpy(np.array(state["cuda"])))


def _draws_on_cuda() -> bool:
    """Return whether layers may draw from the generator of a GPU."""
    return not on_tensorflow() and torch.cuda.is_initialized()


def seed_states(model: keras.Model) -> list[keras.Variable]:
    """Return the states of a model's `keras.random.SeedGenerator`, which are not weights."""
    weights = {id(weight) for weight in model.weights}
    return [
        variable
        for variable in model.non_trainable_variables
        if id(variable) not in weights
        and keras.backend.is_int_dtype(variable.dtype)
        and tuple(variable.shape) == (2,)
    ]


def split_seed_states(model: keras.Model, rank: int) -> None:
    """Derive a rank's own streams from generator states that are equal on all ranks."""
    for state in seed_states(model):
        seed, count = state.numpy().tolist()
        state.assign([rank_seed(seed, rank, count), 0])


def _mixed(own: int, given: list[int]) -> list[int]:
    (number,) = np.random.SeedSequence([own, *(abs(part) for part in given)]).generate_state(1)
    # Keras takes seeds modulo nearly 2**31.
    return [int(number) >> 1, 0]


class TorchBuffer:
    """Buffer of a torch module in a layer, such as a running mean: no variable of Keras.

    Parameters
    ----------
    module : torch.nn.Module
        The module that has the buffer.
    name : str
        The buffer's name in the module.
    """

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._name = module, name

    @property
    def dtype(self) -> str:
        """Name of the type, as Keras spells it."""
        return str(getattr(self._module, self._name).dtype).removeprefix("torch.")

    def numpy(self) -> Any:
        """Return a copy of the value."""
        tensor = getattr(self._module, self._name).detach().cpu()
        return np.array(tensor.float() if tensor.dtype == torch.bfloat16 else tensor)

    def assign(self, value: Any) -> None:
        """Set the value."""
        getattr(self._module, self._name).copy_(torch.as_tensor(value))


def torch_buffers(model: keras.Model) -> list[TorchBuffer]:
    """Return the buffers of the torch modules in a model's layers that are trained."""
    layers = [layer for layer in torch_layers(model) if layer.trainable]
    found = {
        id(buffer): TorchBuffer(module, name)
        for layer in layers
        for module in layer.module.modules()
        for name, buffer in module.named_buffers(recurse=False)
    }
    return [*found.values()]


def updated_variables(model: keras.Model) -> list[Any]:
    """Return the variables, and buffers of torch modules, that layers may update in training."""
    return [*model.non_trainable_variables, *torch_buffers(model)]


class VariableState:
    """Variables that layers update in training, such as statistics of batch normalization.

    Variables of frozen layers, and those to which LoRA adds, are excluded, since these variables do
    not change and can be large.

    Parameters
    ----------
    model : keras.Model
        Built.

    Attributes
    ----------
    variables : list of keras.Variable
        The variables.
    """

    def __init__(self, model: keras.Model) -> None:
        seeds = {id(state) for state in seed_states(model)}
        frozen = {
            id(variable)
            for layer in all_layers(model)
            if not layer.trainable
            or (is_keras(type(layer)) and getattr(layer, "lora_enabled", False))
            for variable in layer.variables
        }
        self.variables = [
            variable for variable in updated_variables(model) if id(variable) not in seeds | frozen
        ]

    def capture(self) -> list[Any]:
        """Return the values."""
        return [variable.numpy() for variable in self.variables]

    def restore(self, state: Sequence[Any]) -> None:
        """Restore the values that `capture` returned."""
        for variable, value in zip(self.variables, state, strict=True):
            variable.assign(value)

    def changed(self, state: Sequence[Any]) -> dict[Any, Any]:
        """Return the values that differ from a state, by position."""
        pairs = enumerate(zip(self.capture(), state, strict=True))
        return {i: value for i, (value, old) in pairs if value.tobytes() != old.tobytes()}


class MicroBatches:
    """Assign the micro-batches of a rank to steps and virtual shards.

    Parameters
    ----------
    model : keras.Model
        The model.
    num_shards : int
        Number of canonical shards.
    rank, size : int
        This rank, and the number of ranks.
    streams : RandomStreams
        The rank's random streams.

    Attributes
    ----------
    variables : VariableState
        Variables that layers update.
    shards : ShardStates
        States of the rank's shards.
    passes : int
        Number of micro-batches per step.
    """

    def __init__(
        self, model: keras.Model, num_shards: int, rank: int, size: int, streams: RandomStreams
    ) -> None:
        self.variables = VariableState(model)
        self.shards = ShardStates(num_shards, rank, size, (streams, self.variables))
        self.passes = self.shards.passes

    def begin(self, batch: int) -> int | None:
        """Enter a micro-batch's shard; return the step if callbacks are notified of its start."""
        step, micro_batch = divmod(batch, self.passes)
        self.shards.enter(micro_batch)
        return None if micro_batch else step

    def end(self, batch: int) -> int | None:
        """End a micro-batch; return the step, counted from 0, if the step has ended."""
        step, micro_batch = divmod(batch, self.passes)
        if micro_batch + 1 < self.passes:
            return None
        self.shards.enter(0)
        return step
