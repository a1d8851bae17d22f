"""Layers that need all ranks, and half precision, compared with Keras in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_reference import assert_same_weights, pooled_estimator, train_alone
from parquet_files import write_columns
from reference import global_batches, write_rows

from hvd_estimators.keras.shard_state import seed_states

pytestmark = pytest.mark.integration


def synchronized_net() -> keras.Model:
    keras.utils.set_random_seed(7)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(6)(inputs)
    shared = keras.layers.BatchNormalization(momentum=0.5, synchronized=True)
    # The same layer twice, in parallel as far as TensorFlow knows.
    hidden = keras.layers.Add()([shared(hidden), shared(keras.layers.ReLU()(hidden))])
    hidden = keras.layers.Reshape((3, 2))(hidden)
    hidden = keras.layers.BatchNormalization(synchronized=True, axis=1)(hidden)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(hidden)))


def test_synchronized_batch_normalization_matches_one_process(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 65)
    estimator = pooled_estimator(
        store,
        2,
        model=synchronized_net(),
        optimizer=keras.optimizers.SGD(0.05, momentum=0.5),
        batch_size=16,
        epochs=2,
    )
    model = estimator.fit_on_parquet().getModel()
    # The ranks' batches have different numbers of rows.
    batches = global_batches(65, 2, 16)
    assert len(set(map(len, batches))) > 1
    expected = train_alone(
        columns,
        batches,
        keras.optimizers.SGD(0.05, momentum=0.5),
        2,
        net=synchronized_net(),
    )
    assert_same_weights(model, expected)
    assert len({result.weights_digest for result in estimator.getBackend().results}) == 1


def embedding_net() -> keras.Model:
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Discretization([-1.0, 0.0, 1.0]),
            keras.layers.Embedding(4, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )


class SummedAdam(keras.optimizers.Adam):
    """Adam that sums the gradients of an embedding's row; Keras's squares each one."""

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        super().apply([tf.convert_to_tensor(grad) for grad in grads], trainable_variables)


def test_gradients_of_embeddings_are_summed_before_the_optimizer(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 64)
    estimator = pooled_estimator(
        store,
        2,
        model=embedding_net(),
        optimizer=keras.optimizers.Adam(0.01),
        batch_size=8,
        epochs=2,
    )
    model = estimator.fit_on_parquet().getModel()
    batches = global_batches(64, 2, 8)
    summed, alone = (
        train_alone(columns, batches, optimizer, 2, net=embedding_net())
        for optimizer in (SummedAdam(0.01), keras.optimizers.Adam(0.01))
    )
    assert_same_weights(model, summed)
    # If this fails, Keras sums them, too: the note in the page on Keras is out of date.
    assert np.abs(alone.get_weights()[0] - summed.get_weights()[0]).max() > 1e-3


class Half(keras.Model):
    """Model whose layers use the dtype policy at its construction."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden = keras.layers.Dense(4)
        self.out = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))

    def get_config(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def bfloat16() -> Iterator[None]:
    keras.config.set_dtype_policy("bfloat16")
    yield
    keras.config.set_dtype_policy("float32")


def test_a_bfloat16_model_trains_as_one_process(store: Any, bfloat16: None) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 64)

    def net() -> keras.Model:
        keras.utils.set_random_seed(5)
        model = Half()
        model(np.zeros((1, 4)))
        return model

    estimator = pooled_estimator(
        store, 2, model=net(), optimizer=keras.optimizers.SGD(0.01), batch_size=8, epochs=2
    )
    fitted = estimator.fit_on_parquet()
    alone = train_alone(columns, global_batches(64, 2, 8), keras.optimizers.SGD(0.01), 2, net=net())
    # Like another process, which has not set the policy.
    keras.config.set_dtype_policy("float32")
    document, load = fitted._make_predictor()
    (outputs,) = load(document)([columns["features"]])
    assert fitted._get_floatx() == "float32"
    assert fitted._get_metadata()["features"]["shape"] == [4]
    model = fitted.getModel()
    assert {str(weight.dtype) for weight in model.weights} == {"bfloat16"}
    assert len({result.weights_digest for result in estimator.getBackend().results}) == 1
    # Each step loses some of the 8 bits.
    expected = alone.predict(columns["features"], verbose=0).astype(np.float32)
    np.testing.assert_allclose(outputs.astype(np.float32), expected, atol=0.15)
    assert fitted.getHistory()["loss"][1] < 0.5 * fitted.getHistory()["loss"][0]


# Feature columns of two to five dimensions, including the batch.
SHAPES = {"of_2": (4,), "of_3": (6, 4), "of_4": (6, 6, 4), "of_5": (4, 4, 4, 4)}
N = keras.layers
PLAIN_LAYERS: list[Callable[[], Any]] = [
    lambda: N.Activation("tanh"),
    lambda: N.ActivityRegularization(l2=0.01),
    lambda: N.AlphaDropout(0.0),
    lambda: N.AveragePooling1D(2),
    lambda: N.AveragePooling2D(2),
    lambda: N.AveragePooling3D(2),
    lambda: N.AdaptiveAveragePooling1D(2),
    lambda: N.AdaptiveAveragePooling2D(2),
    lambda: N.AdaptiveAveragePooling3D(2),
    lambda: N.AdaptiveMaxPooling1D(2),
    lambda: N.AdaptiveMaxPooling2D(2),
    lambda: N.AdaptiveMaxPooling3D(2),
    lambda: N.BatchNormalization(synchronized=True),
    lambda: N.Bidirectional(N.LSTM(3, return_sequences=True)),
    lambda: N.CenterCrop(4, 4),
    lambda: N.Conv1D(3, 2),
    lambda: N.Conv1DTranspose(3, 2),
    lambda: N.Conv2D(3, 2, groups=1, padding="same"),
    lambda: N.Conv2DTranspose(3, 2),
    lambda: N.Conv3D(3, 2),
    lambda: N.Conv3DTranspose(3, 2),
    lambda: N.ConvLSTM1D(2, 2),
    lambda: N.ConvLSTM2D(2, 2),
    lambda: N.Cropping1D(1),
    lambda: N.Cropping2D(1),
    lambda: N.Cropping3D(1),
    lambda: N.Dense(3),
    lambda: N.DepthwiseConv1D(2),
    lambda: N.DepthwiseConv2D(2),
    lambda: N.Discretization([-0.5, 0.0, 0.5]),
    lambda: N.Dropout(0.0),
    N.ELU,
    N.Flatten,
    lambda: N.GRU(3),
    lambda: N.GaussianDropout(0.0),
    lambda: N.GaussianNoise(0.0),
    N.GlobalAveragePooling1D,
    N.GlobalAveragePooling2D,
    N.GlobalAveragePooling3D,
    N.GlobalMaxPooling1D,
    N.GlobalMaxPooling2D,
    N.GlobalMaxPooling3D,
    lambda: N.GroupNormalization(2),
    N.Identity,
    lambda: N.LSTM(3),
    lambda: N.Lambda(keras.ops.square),
    N.LayerNormalization,
    N.LeakyReLU,
    N.Masking,
    lambda: N.MaxPooling1D(2),
    lambda: N.MaxPooling2D(2),
    lambda: N.MaxPooling3D(2),
    lambda: N.Normalization(mean=0.5, variance=2.0),
    lambda: N.PReLU("ones"),
    lambda: N.Pipeline([N.Rescaling(0.5)]),
    N.RMSNormalization,
    lambda: N.RNN([N.LSTMCell(3), N.GRUCell(2)]),
    N.ReLU,
    lambda: N.RepeatVector(2),
    lambda: N.Rescaling(0.5),
    lambda: N.Reshape((-1, 2)),
    lambda: N.Resizing(3, 3),
    lambda: N.SeparableConv1D(3, 2),
    lambda: N.SeparableConv2D(3, 2),
    lambda: N.SimpleRNN(3),
    lambda: N.RNN(N.StackedRNNCells([N.SimpleRNNCell(3), N.SimpleRNNCell(2)])),
    N.Softmax,
    lambda: N.SpatialDropout1D(0.0),
    lambda: N.SpatialDropout2D(0.0),
    lambda: N.SpatialDropout3D(0.0),
    lambda: N.SpectralNormalization(N.Dense(3)),
    lambda: N.TimeDistributed(N.Dense(3)),
    N.UnitNormalization,
    lambda: N.UpSampling1D(2),
    lambda: N.UpSampling2D(2),
    lambda: N.UpSampling3D(2),
    lambda: N.ZeroPadding1D(1),
    lambda: N.ZeroPadding2D(1),
    lambda: N.ZeroPadding3D(1),
]
# Layers that are called on a list of two tensors.
JOINING_LAYERS: list[Callable[[], Any]] = [
    *(N.Add, N.Average, N.Concatenate, N.Maximum, N.Minimum, N.Multiply, N.Subtract),
    lambda: N.Dot(axes=-1),
]
# With two dimensions these layers mix the rows of a batch.
STEP_LAYERS: list[Callable[[], Any]] = [N.AdditiveAttention, lambda: N.Attention(use_scale=True)]
ATTENTION_LAYERS: list[Callable[[], Any]] = [
    lambda: N.MultiHeadAttention(2, 3),
    lambda: N.GroupQueryAttention(3, 4, 2),
]
TOKEN_LAYERS: list[Callable[[], Any]] = [
    lambda: N.Embedding(8, 3),
    lambda: N.ReversibleEmbedding(8, 3),
    lambda: N.CategoryEncoding(8, output_mode="multi_hot"),
    lambda: N.IntegerLookup(vocabulary=[1, 2, 3], output_mode="multi_hot"),
    lambda: N.Hashing(4),
]
# Layers without numeric inputs, unusable alone, of six dimensions, or with random outputs.
LEFT_OUT = {
    *("FlaxLayer", "JaxLayer", "TFSMLayer", "TorchModuleWrapper"),
    *("StringLookup", "TextVectorization", "HashedCrossing", "MaxNumBoundingBoxes"),
    *("Layer", "Wrapper", "InputLayer", "InputSpec", "ConvLSTM3D"),
    *("GRUCell", "LSTMCell", "SimpleRNNCell", "StackedRNNCells"),
    *("MelSpectrogram", "STFTSpectrogram"),
    *("AugMix", "CutMix", "MixUp", "RandAugment"),
    *("AutoContrast", "ContrastLimitedAdaptiveHistogramEqualization"),
    *("Equalization", "Solarization"),
}


def first_tensor(output: Any) -> Any:
    return output[0] if isinstance(output, (list, tuple)) else output


def all_layers_net(names: Sequence[str]) -> tuple[keras.Model, dict[type, list[int]]]:
    """Return a network with a branch for each layer and each supported number of dimensions."""
    keras.utils.set_random_seed(11)
    inputs = {name: keras.Input(SHAPES[name], name=name) for name in names}
    tokens = keras.Input((5,), dtype="int32", name="tokens")
    branches = []
    dimensions: dict[type, list[int]] = {}

    def add(make: Callable[[], Any], *arguments: Any) -> None:
        """Add a branch if plain Keras can call the layer on rows."""
        rows = keras.tree.map_structure(lambda x: np.ones((2, *x.shape[1:]), x.dtype), arguments)
        try:
            called = first_tensor(make()(*rows))
            layer = make()
            output = first_tensor(layer(*arguments))
        except Exception:
            return
        # Keras is wrong on some shapes, and some image layers read these rows as one image.
        if output.shape == (None, *called.shape[1:]):
            branches.append(N.Flatten()(keras.ops.cast(output, "float32")))
            first = keras.tree.flatten(arguments)[0]
            dimensions.setdefault(type(layer), []).append(len(first.shape))

    for given in inputs.values():
        x = N.Dense(4, activation="tanh")(given)
        y = N.Dense(4, activation="tanh")(given)
        first = "abcd"[: len(given.shape) - 1]
        equation, sizes = f"{first}y,yz->{first}z", (*given.shape[1:-1], 3)
        add(functools.partial(N.EinsumDense, equation, sizes, bias_axes="z"), x)
        add(functools.partial(N.Permute, range(len(sizes), 0, -1)), x)
        for make in PLAIN_LAYERS:
            add(make, x)
        for make in JOINING_LAYERS:
            add(make, [x, y])
        for make in STEP_LAYERS if len(sizes) > 1 else ():
            add(make, [x, y])
        for make in ATTENTION_LAYERS:
            add(make, x, y)
    for make in TOKEN_LAYERS:
        add(make, tokens)
    output = N.Dense(1)(N.Concatenate()(branches))
    return keras.Model([*inputs.values(), tokens], output), dimensions


def write_inputs(path: Path, rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    columns = {name: rng.normal(size=(rows, *s)).astype("float32") for name, s in SHAPES.items()}
    columns["tokens"] = rng.integers(0, 8, (rows, 5)).astype("int32")
    columns["label"] = rng.normal(size=rows).astype("float32")
    flat = {name: a if a.ndim == 1 else a.reshape(rows, -1) for name, a in columns.items()}
    for number, part in enumerate(np.array_split(np.arange(rows), 2)):
        rows_of_file = {name: a[part] for name, a in flat.items()}
        write_columns(path, rows_of_file, name=f"{number}.parquet")
    return columns


@pytest.mark.soak
@pytest.mark.parametrize(
    "names",
    [["of_3"], pytest.param(list(SHAPES), marks=[pytest.mark.soak, pytest.mark.timeout(900)])],
    ids=["3 dimensions", "2 to 5 dimensions"],
)
def test_all_layers_train_as_one_process(store: Any, names: list[str]) -> None:
    columns = write_inputs(Path(store.get_train_data_path()), 24)
    model, dimensions = all_layers_net(names)
    if len(names) == len(SHAPES):
        every = {kind for kind in vars(keras.layers).values() if isinstance(kind, type)}
        left_out = {getattr(N, name) for name in LEFT_OUT if hasattr(N, name)}
        random = {kind for kind in every if kind.__name__.startswith("Random")}
        assert dimensions.keys() == every - left_out - random
        assert dimensions[N.Dense] == dimensions[N.LayerNormalization] == [2, 3, 4, 5]
    assert len(dimensions) > 50

    features = [*names, "tokens"]
    estimator = pooled_estimator(
        store,
        2,
        model=model,
        optimizer=keras.optimizers.SGD(0.001, momentum=0.5),
        feature_cols=features,
        batch_size=4,
    )
    found = estimator.fit_on_parquet().getModel()
    alone, _ = all_layers_net(names)
    before = [variable.numpy() for variable in alone.variables]
    alone.compile(keras.optimizers.SGD(0.001, momentum=0.5), "mse")
    for batch in global_batches(24, 2, 4):
        rows = [columns[name][batch] for name in features]
        alone.train_on_batch(rows, columns["label"][batch, None])
    # Ranks have random states of their own, which these layers do not use.
    seeds = {id(state) for state in seed_states(alone)}
    for ours, expected, start in zip(found.variables, alone.variables, before, strict=True):
        if id(expected) in seeds:
            continue
        moved = np.abs(expected.numpy() - start).max()
        # A softmax over keys cancels a bias that all keys share.
        assert not expected.trainable or moved > 0 or expected.path.endswith("key/bias")
        limit = 1e-3 * moved + 2e-7 * (1.0 + np.abs(start).max())
        np.testing.assert_allclose(ours, expected, rtol=0, atol=limit, err_msg=expected.path)
