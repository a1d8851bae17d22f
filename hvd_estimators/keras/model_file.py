"""Values of a model's and all its optimizers' variables, in order, in memory or as one file.

A value is found by its layer and its name, since other processes number names in another way. The
file is an archive with a member of raw bytes per value, written and read one by one. Keras's own
files lack a LoRA layer's adapters and the states of optimizers in attributes.
"""

from __future__ import annotations

import collections
import json
import re
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import keras
import numpy as np

from hvd_estimators.data.arrays import Array
from hvd_estimators.keras.backend import all_layers, model_optimizers, numpy_dtype, to_dense
from hvd_estimators.keras.custom_objects import UnequalCopyError

CONTENT = "hvd_estimators.keras.json"
"""Member of a file that describes its values."""


@dataclass(frozen=True)
class ModelValues:
    """Values of a model, and of the optimizers that it has.

    Attributes
    ----------
    variables : list of (str, str, bool)
        For each variable of the model: layer and name, the path, by which a MultiOptimizer selects
        variables, and whether it is trainable.
    layers : list of bool
        Whether each layer is trainable, whose variables may be different.
    optimizers : list
        For each optimizer, the names of the variables that it trains, and the number of its slots
        and counters. Both are empty for one without a state.
    states : list of str
        Names of what layers save besides variables, such as a vocabulary.
    forms : list of (list of int, str)
        Shape and type of each array.
    arrays : iterable of numpy.ndarray
        Values of the variables, of the optimizers' variables, and of the states.
    """

    variables: list[tuple[str, str, bool]]
    layers: list[bool]
    optimizers: list[tuple[list[str], int]]
    states: list[str]
    forms: list[tuple[list[int], str]]
    arrays: Iterable[Array]

    @staticmethod
    def of(
        model: keras.Model, optimizers: Sequence[Any] | None = None, copied: bool = False
    ) -> ModelValues:
        """Return the values of a model.

        Parameters
        ----------
        model : keras.Model
            The model.
        optimizers : sequence of keras.optimizers.Optimizer or None, optional
            Its optimizers, with None for one whose state is left out. Default: all of them.
        copied : bool
            Whether to copy the values. Otherwise, they may change with the model.
        """
        named = _by_name(model)
        names = {id(variable): name for name, variable in named.items()}
        variables, states = list(named.values()), _layer_states(model)
        entries: list[tuple[list[str], int]] = []
        for optimizer in model_optimizers(model) if optimizers is None else optimizers:
            is_built = optimizer is not None and optimizer.built
            ids = list(map(id, optimizer._trainable_variables)) if is_built else []
            # An optimizer of variables outside of the model stays without a state in copies.
            own = optimizer.variables if ids and names.keys() >= set(ids) else []
            entries.append(([names[number] for number in ids] if own else [], len(own)))
            variables += own
        arrays = [*map(variable_value, variables), *states.values()]
        return ModelValues(
            [(name, variable.path, variable.trainable) for name, variable in named.items()],
            [layer.trainable for layer in all_layers(model)],
            entries,
            list(states),
            [(list(array.shape), str(array.dtype)) for array in arrays],
            [np.array(array) for array in arrays] if copied else arrays,
        )

    def assign(self, model: keras.Model) -> None:
        """Assign the values to another copy of the model, and build its optimizers.

        Raises
        ------
        UnequalCopyError
            If the model has other variables or optimizers.
        """
        named = self.check(model)
        for layer, trainable in zip(all_layers(model), self.layers, strict=True):
            # Without an effect on the layers below and on variables.
            layer._trainable = trainable
        for name, path, trainable in self.variables:
            named[name]._path, named[name].trainable = path, trainable
        targets: list[Any] = [named[name] for name, *_ in self.variables]
        optimizers = model_optimizers(model)
        # Optimizers in attributes are the last, after the one of compile() if there is one.
        count = len(self.optimizers)
        optimizers = ([None] * count + optimizers)[len(optimizers) :]
        for optimizer, (of_model, count) in zip(optimizers, self.optimizers, strict=True):
            own: list[Any] = [None] * count
            if count and optimizer is not None:
                trained = [named[name] for name in of_model]
                if not optimizer.built:
                    optimizer.build(trained)
                own = optimizer.variables
                known = list(map(id, optimizer._trainable_variables))
                if known != list(map(id, trained)) or len(own) != count:
                    raise UnequalCopyError(
                        f"its optimizer {type(optimizer).__name__} has slots for other variables, "
                        "or in another order"
                    )
            targets += own
        arrays = iter(self.arrays)
        for target in targets:
            value = next(arrays)
            if target is not None:
                target.assign(value)
        _restore_states(model, dict(zip(self.states, arrays, strict=True)))

    def check(self, model: keras.Model) -> dict[str, keras.Variable]:
        """Return a copy's variables by their names; check that they are as the model's."""
        named = _by_name(model)
        if missing := {name for name, *_ in self.variables}.symmetric_difference(named):
            raise UnequalCopyError(
                f"it has {len(self.variables)} variables, and a copy has {len(named)}; only one of "
                f"the two has {min(missing)!r}"
            )
        for (name, *_), (shape, dtype) in zip(self.variables, self.forms, strict=False):
            other = named[name]
            if tuple(shape) != tuple(other.shape) or _kind(dtype) != _kind(other.dtype):
                raise UnequalCopyError(
                    f"its variable {name!r} has shape {tuple(shape)} and type {dtype}; in a copy, "
                    f"{tuple(other.shape)} and {other.dtype}"
                )
        return named

    def write(self, file: IO[bytes] | str) -> None:
        """Write a file."""
        fields = {**vars(self), "arrays": None}
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(zipfile.ZipInfo(CONTENT), json.dumps(fields))
            for number, array in enumerate(self.arrays):
                member = zipfile.ZipInfo(f"values/{number:06d}")
                with archive.open(member, "w", force_zip64=array.nbytes > 2**30) as opened:
                    opened.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    @staticmethod
    def read(archive: zipfile.ZipFile) -> ModelValues:
        """Return the values of an open file, read when they are used."""
        fields = json.loads(archive.read(CONTENT))

        def arrays() -> Iterator[Array]:
            for number, (shape, dtype) in enumerate(fields["forms"]):
                content = np.frombuffer(archive.read(f"values/{number:06d}"), np.uint8)
                yield content.view(numpy_dtype(dtype)).reshape(shape)

        return ModelValues(**{**fields, "arrays": arrays()})


def _kind(dtype: Any) -> str:
    """Return a type's name, for whole numbers without their size: backends have other seeds."""
    return re.sub(r"^u?int\d+$", "int", str(dtype))


def variable_value(variable: keras.Variable) -> Array:
    """Return a variable's value, read-only and without a copy if NumPy supports its type."""
    tensor = to_dense(variable.value)
    try:
        value = np.asarray(memoryview(tensor))
    except (TypeError, ValueError):  # such as bfloat16, and torch's tensors
        value = keras.ops.convert_to_numpy(tensor)
    return np.ascontiguousarray(value).reshape(tuple(variable.shape))


def save_values(model: keras.Model, file: IO[bytes] | str) -> None:
    """Write the values of a model and its optimizers to a file."""
    ModelValues.of(model).write(file)


def load_values(model: keras.Model, file: IO[bytes] | str) -> None:
    """Read a file from `save_values` into another copy of the model."""
    with zipfile.ZipFile(file) as archive:
        ModelValues.read(archive).assign(model)


def read_content(file: IO[bytes], safe: bool, folder: Any) -> dict[str, Array]:
    """Return the values of a model's variables by name, in the order of ``model.variables``.

    Parameters
    ----------
    file : file
        The checkpoint.
    safe, folder : object
        Not used.
    """
    with zipfile.ZipFile(file) as archive:
        values = ModelValues.read(archive)
        return dict(zip((name for name, *_ in values.variables), values.arrays, strict=False))


def _by_name(model: keras.Model) -> dict[str, keras.Variable]:
    """Return a model's variables by layer and name, without the numbers that a process counts."""
    layers = all_layers(model)
    # Layers follow those that contain them.
    owners = {id(v): number for number, layer in enumerate(layers) for v in layer.variables}
    named: dict[str, keras.Variable] = {}
    counts: collections.Counter[str] = collections.Counter()
    for variable in model.variables:
        number = owners[id(variable)]
        name = re.sub(r"_\d+", "", variable.name)
        key = f"{type(layers[number]).__name__} ({number}): {name}"
        counts[key] += 1
        named[key if counts[key] == 1 else f"{key} {counts[key]}"] = variable
    return named


def _layer_states(model: keras.Model) -> dict[str, Array]:
    """Return the states that layers save besides variables, and the files of their assets."""
    states: dict[str, Array] = {}
    for number, layer in enumerate(all_layers(model)):
        kind = type(layer)
        saves = kind.save_own_variables is not keras.Layer.save_own_variables
        loads = kind.load_own_variables is not keras.Layer.load_own_variables
        # Keras's layers with adapters merge them into another variable.
        if (saves or loads) and not hasattr(kind, "enable_lora"):
            store: dict[str, Any] = {}
            layer.save_own_variables(store)
            for name, value in store.items():
                states[f"{number}/{name}"] = np.array(keras.ops.convert_to_numpy(value))
            states[f"{number}/"] = np.zeros(0)
        if callable(getattr(layer, "save_assets", None)):
            with tempfile.TemporaryDirectory() as directory:
                layer.save_assets(directory)
                for path in filter(Path.is_file, sorted(Path(directory).rglob("*"))):
                    name = f"{number}:{path.relative_to(directory)}"
                    states[name] = np.fromfile(path, np.uint8)
    return states


def _restore_states(model: keras.Model, states: Mapping[str, Array]) -> None:
    for number, layer in enumerate(all_layers(model)):
        own, files = (
            {name.removeprefix(start): v for name, v in states.items() if name.startswith(start)}
            for start in (f"{number}/", f"{number}:")
        )
        if own:
            own.pop("")
            layer.load_own_variables(own)
        if files:
            with tempfile.TemporaryDirectory() as directory:
                for name, content in files.items():
                    path = Path(directory, name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    content.tofile(path)
                layer.load_assets(directory)
