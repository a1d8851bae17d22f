"""An epoch that is on its way: all that goes on from a checkpoint within it, but weights and such.

Lightning's own checkpoint has the module's parameters, optimizers, schedulers, the states of
callbacks and loops. What an epoch has measured so far, and what has been set for it, is in none.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvd_estimators.lightning.flavor import Flavor
from hvd_estimators.lightning.logged import logged_so_far, restore_logged
from hvd_estimators.torch.checkpoint import copied
from hvd_estimators.torch.metric_states import metric_states, restore_metrics

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

    from hvd_estimators.lightning.callbacks import EpochRecorder
    from hvd_estimators.lightning.loaders import TrainLoader

__all__ = ["PartialEpoch"]


class PartialEpoch:
    """Takes down what an epoch has come to on this rank, and gives it back to a resumed one.

    Parameters
    ----------
    recorder : EpochRecorder
        Has the means of the losses.
    loader : TrainLoader or None
        Gives the batches; None with a data module of the user's.
    rank, size : int
        This rank, and the number of ranks.
    flavor : Flavor
        The Trainer's package.

    Attributes
    ----------
    base_attributes : frozenset of str
        Attributes that every LightningModule has.
    """

    def __init__(
        self,
        recorder: EpochRecorder,
        loader: TrainLoader | None,
        rank: int,
        size: int,
        flavor: Flavor,
    ) -> None:
        self._recorder = recorder
        self._loader = loader
        self.rank = rank
        self._size = size
        self._flavor = flavor
        self.base_attributes = frozenset(vars(flavor.get("LightningModule")()))

    def state(self, trainer: Trainer) -> dict[str, Any]:
        """Return what there is on this rank, as values that can be pickled."""
        module = trainer.lightning_module
        return {
            "recorder": self._recorder.state(),
            "logged": logged_so_far(trainer),
            "metrics": metric_states(module),
            "stand_in": None if self._loader is None else self._loader.stand_in(),
            "frozen": [n for n, p in module.named_parameters() if not p.requires_grad],
            "evaluating": [name for name, part in module.named_modules() if not part.training],
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "should_stop": trainer.should_stop,
        }

    def restore(self, trainer: Trainer, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what there was.

        Parameters
        ----------
        trainer : Trainer
            Is about to take the next batch.
        states : sequence of mapping
            What `state` returned on each of the ranks; there may have been more or fewer.
        """
        module = trainer.lightning_module
        first = states[0]
        # A rank stands for those whose shards it plays; there may be none.
        own = states[self.rank :: self._size]
        self._recorder.restore(trainer, [state["recorder"] for state in own])
        if own:
            restore_logged(trainer, [state["logged"] for state in own], self._flavor)
            restore_metrics(module, [state["metrics"] for state in own])
        else:
            restore_logged(trainer, [_without_values(first["logged"])], self._flavor)
        if self._loader is not None:
            lent = [s["stand_in"] for s in (*own, *states) if s["stand_in"] is not None]
            self._loader.lend(lent[0] if lent else None)
        _restore_module(module, first)
        # Set by a callback in the epoch; it counts for as many shards as ranks played then.
        if "accumulate_grad_batches" in first:
            trainer.accumulate_grad_batches = first["accumulate_grad_batches"]
        trainer.should_stop = first["should_stop"]


def repeat_epoch_start(trainer: Trainer) -> None:
    """Call the user's ``on_train_epoch_start`` hooks again, and undo what they do to the state.

    Lightning does not call them in an epoch that is resumed, and they make attributes that the
    steps use, such as lists of losses. Weights, buffers, learning rates, schedulers and callbacks
    keep the state that was restored.
    """
    given: Any = trainer
    module, name = trainer.lightning_module, "on_train_epoch_start"
    callbacks = [c for c in given.callbacks if not _is_library(getattr(type(c), name))]
    has_hook = not _is_library(getattr(type(module), name))
    if not (callbacks or has_hook):
        return
    weights = copied({**dict(module.named_buffers()), **module.state_dict()})
    options = [[dict(group) for group in o.param_groups] for o in trainer.optimizers]
    schedulers = [copy.deepcopy(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs]
    states = [copy.deepcopy(callback.state_dict()) for callback in callbacks]
    # Under this name they can log.
    before, module._current_fx_name = module._current_fx_name, name
    with _known_groups_ignored(trainer):
        for callback in callbacks:
            getattr(callback, name)(trainer, module)
        if has_hook:
            module.on_train_epoch_start()
    module._current_fx_name = before
    module.load_state_dict({n: v for n, v in weights.items() if n in module.state_dict()})
    with torch.no_grad():
        for buffer_name, buffer in module.named_buffers():
            if buffer_name in weights:
                buffer.copy_(weights[buffer_name])
    for optimizer, groups in zip(trainer.optimizers, options, strict=True):
        for group, saved in zip(optimizer.param_groups, groups, strict=False):
            group.update({key: value for key, value in saved.items() if key != "params"})
    for config, state in zip(trainer.lr_scheduler_configs, schedulers, strict=True):
        config.scheduler.load_state_dict(state)
    for callback, state in zip(callbacks, states, strict=True):
        if state:
            callback.load_state_dict(state)


@contextlib.contextmanager
def _known_groups_ignored(trainer: Trainer) -> Iterator[None]:
    """Let hooks add parameter groups that the checkpoint has added already, without effect."""
    wrappers: Any = trainer.lightning_module.optimizers()
    given = wrappers if isinstance(wrappers, list) else [wrappers]
    owners = {id(owner): owner for owner in (*trainer.optimizers, *given)}
    for owner in owners.values():
        vars(owner)["add_param_group"] = functools.partial(_add_unknown, owner)
    try:
        yield
    finally:
        for owner in owners.values():
            del vars(owner)["add_param_group"]


def _add_unknown(optimizer: Any, param_group: dict[str, Any]) -> None:
    given = param_group["params"]
    added = [given] if isinstance(given, torch.Tensor) else list(given)
    tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in added]
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not all(id(tensor) in known for tensor in tensors):
        type(optimizer).add_param_group(optimizer, {**param_group, "params": added})


def _is_library(function: Any) -> bool:
    packages = ("pytorch_lightning.", "lightning.", "hvd_estimators.")
    return f"{getattr(function, '__module__', '')}.".startswith(packages)


def _without_values(logged: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank logged as one would have that has had no batch."""
    train, validation = logged["results"]
    # Those of a validation are the same on all ranks: it is over.
    empty = {key: {**entry, "has_reset": True} for key, entry in train.items()}
    without = {**logged, "results": [empty, validation]}
    if "epochs" in logged:
        train, validation = logged["epochs"]
        without["epochs"] = [{**train, "rows": 0}, validation]
    return without


def _restore_module(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    frozen, evaluating = set(state["frozen"]), set(state["evaluating"])
    for name, parameter in module.named_parameters():
        if parameter.requires_grad is (name in frozen):
            parameter.requires_grad_(name not in frozen)
    for name, part in module.named_modules():
        part.training = name not in evaluating
