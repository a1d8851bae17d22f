"""Ranks that stop together, whichever of them decides to."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hvd_estimators.lightning.collectives import outside_inference_mode
from hvd_estimators.lightning.flavor import is_lightning
from hvd_estimators.lightning.wrapping import wrapped
from hvd_estimators.torch.ranks import sum_over_ranks

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

__all__ = ["agree_on_stopping"]

_ATTRIBUTE = "should_stop"
_HOOK = "on_train_batch_start"
_SKIP_EPOCH = -1


def agree_on_stopping(trainer: Trainer) -> Callable[[], None]:
    """Make all ranks stop at the step at which one of them does.

    The module or a callback of one rank may set ``trainer.should_stop``, for example because of a
    loss that is the rank's own. The other ranks would wait for that rank forever. So ranks agree
    when an epoch begins, after each validation and each epoch. They agree after each batch, too, if
    the module or a callback names the attribute in its code; otherwise a stop that something else
    asks for takes effect at the end of the epoch. They also agree where the module's
    ``on_train_batch_start`` returns -1 to skip the rest of the epoch.

    Returns
    -------
    callable
        Leaves the trainer and its module as they were.
    """
    loop: Any = trainer.fit_loop
    module: Any = trainer.lightning_module
    given: Any = trainer
    each_batch = any(map(_names_attribute, [module, *given.callbacks]))
    wanted = False

    def agree() -> None:
        nonlocal wanted
        trainer.should_stop = _any_rank(trainer.should_stop or wanted)
        wanted = False

    def put_off() -> None:
        nonlocal wanted
        wanted, trainer.should_stop = wanted or trainer.should_stop, False

    undo = contextlib.ExitStack()
    undo.enter_context(wrapped(loop.epoch_loop, "on_run_start", after=agree))
    undo.enter_context(
        wrapped(loop.epoch_loop, "on_advance_end", before=agree if each_batch else put_off)
    )
    undo.enter_context(wrapped(loop.epoch_loop.val_loop, "run", after=agree))
    undo.enter_context(wrapped(loop, "on_advance_end", after=agree))
    if _HOOK in vars(module) or _is_of_user(module, _HOOK):
        original, own = module.on_train_batch_start, vars(module).get(_HOOK)

        def on_train_batch_start(*args: Any, **kwargs: Any) -> Any:
            returned = original(*args, **kwargs)
            return _SKIP_EPOCH if _any_rank(returned == _SKIP_EPOCH) else returned

        undo.callback(_restore, module, own)
        vars(module)[_HOOK] = on_train_batch_start
    return undo.close


def _is_of_user(module: Any, hook: str) -> bool:
    owner = next(kind for kind in type(module).__mro__ if hook in vars(kind))
    return not owner.__module__.startswith(("lightning.", "pytorch_lightning."))


def _restore(module: Any, own: Any) -> None:
    if own is None:
        del vars(module)[_HOOK]
    else:
        vars(module)[_HOOK] = own


def _names_attribute(owner: Any) -> bool:
    """Return whether the code of an object's classes, or functions that it has, may stop."""
    if type(owner).__name__ == "EarlyStopping" and is_lightning(owner, "callbacks.EarlyStopping"):
        return False  # It stops after a validation or an epoch, on all ranks.
    members = [*vars(owner).values()]
    for kind in type(owner).__mro__:
        members += vars(kind).values()
    return any(_ATTRIBUTE in names for member in members for names in _names(member))


def _names(member: Any) -> Iterator[tuple[str, ...]]:
    """Yield the names and the constants of a function's code, and of the functions within it."""
    while hasattr(member, "__wrapped__"):
        member = member.__wrapped__
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    code = getattr(function, "__code__", None)
    waiting = [code] if isinstance(code, types.CodeType) else []
    while waiting:
        found = waiting.pop()
        yield found.co_names
        yield tuple(constant for constant in found.co_consts if isinstance(constant, str))
        waiting += [
            constant for constant in found.co_consts if isinstance(constant, types.CodeType)
        ]


@outside_inference_mode
def _any_rank(wanted: bool) -> bool:
    return sum_over_ranks(float(wanted), name="should_stop") > 0
