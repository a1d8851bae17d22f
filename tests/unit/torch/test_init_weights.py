"""Modules made without the weights that files have."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import fsspec
import pytest
import torch
from counted import CountedFileSystem
from safetensors.torch import load_file, save_file

from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.store import FilesystemStore, LocalStore, registry
from hvd_estimators.torch import TorchEstimator
from hvd_estimators.torch.framework import TorchFramework
from hvd_estimators.torch.serialization import dump_module, load_module
from hvd_estimators.torch.stored_weights import (
    find_weights_in,
    load_weights,
    made_without_weights,
    stored_weights,
)


class Net(torch.nn.Module):
    """Two layers that share weights, batch normalization, and a head."""

    def __init__(self, head: int = 3) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("positions", torch.arange(4.0), persistent=False)
        self.head = torch.nn.Linear(4, head)
        torch.nn.init.constant_(self.head.weight, 0.25)


def save(folder: Path, module: torch.nn.Module, without: str = "none") -> str:
    """Write a module's weights, each once, in two files; leave a layer's out."""
    state = {n: v for n, v in module.state_dict().items() if n != "last.weight"}
    kept = [(name, value) for name, value in state.items() if without not in name]
    folder.mkdir()
    for number in (0, 1):
        save_file(dict(kept[number::2]), folder / f"model-{number}.safetensors")
    return str(folder)


def trained() -> Net:
    torch.manual_seed(4)
    net = Net()
    net.norm(torch.randn(8, 4))
    return net


def make(path: str, function: Callable[..., Any] = Net, **arguments: Any) -> torch.nn.Module:
    return made_without_weights(function, path, LocalStore(str(Path(path).parent)), **arguments)


def test_a_module_gets_the_weights_of_files_and_keeps_what_they_lack(tmp_path: Path) -> None:
    net = trained()
    module: Any = make(save(tmp_path / "base", net, without="head"), head=2)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    on_meta = {name for name, parameter in module.named_parameters() if parameter.is_meta}
    assert on_meta == {n for n, _ in net.named_parameters() if not n.startswith("head")}
    document = dump_module((module, optimizer))
    loaded, _ = load_module(document)
    find_weights_in(loaded, LocalStore(str(tmp_path)))
    load_weights(loaded)
    assert stored_weights(loaded) is None
    for name, expected in net.state_dict().items():
        if not name.startswith("head"):
            torch.testing.assert_close(loaded.state_dict()[name], expected, rtol=0, atol=0)
    assert loaded.positions.tolist() == [0, 1, 2, 3]
    assert loaded.last.weight is loaded.first.weight
    assert loaded.head.weight.tolist() == [[0.25] * 4] * 2
    # Layers are made as ever afterwards.
    assert not torch.nn.Linear(1, 1).weight.is_meta


def test_the_files_may_be_on_another_filesystem_than_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores of one class, as those on S3 and on GCS are."""
    fsspec.register_implementation("counted", CountedFileSystem, clobber=True)
    monkeypatch.setattr(CountedFileSystem, "_note", lambda *_: None)
    monkeypatch.setitem(registry._stores, "counted", FilesystemStore)
    net, run = trained(), FilesystemStore("memory://run")
    path = save(tmp_path / "base", net)
    module: Any = made_without_weights(Net, f"counted://{path}", run)
    find_weights_in(module, run)
    load_weights(module)
    torch.testing.assert_close(module.head.weight, net.head.weight, rtol=0, atol=0)
    with pytest.raises(ParamError, match=r"^init_weights: no store for the scheme 'nothing'"):
        made_without_weights(Net, "nothing://base", run)


def test_lacking_weights_are_told_and_renamed_ones_are_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tmp_path / "base", trained(), without="head")
    make(path)
    assert caplog.messages == [
        "The files of init_weights lack parameters, which keep the function's values: "
        "head.weight, head.bias."
    ]

    class Renamed(Net):
        """Net whose layer has another name in the files."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.ModuleDict({"inner": torch.nn.BatchNorm1d(4)})

    with pytest.raises(ParamError, match=r"'norm\.bias', which .* not 'norm\.inner\.weight'"):
        make(path, Renamed)


def test_the_network_within_a_module_gets_the_weights_of_its_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrapper(torch.nn.Module):
        """Module with a network, as LightningModules are."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Linear(2, 2)
            self.network = Net()

    net = trained()
    module = make(save(tmp_path / "base", net, without="head"), Wrapper)
    find_weights_in(module, LocalStore(str(tmp_path)))
    load_weights(module)
    for name, expected in net.state_dict().items():
        if not name.startswith("head"):
            found = module.state_dict()[f"network.{name}"]
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert caplog.messages == [
        "The files of init_weights lack parameters, which keep the function's values: "
        "scale.weight, scale.bias, network.head.weight, network.head.bias."
    ]


def test_a_body_is_loaded_into_a_model_with_a_head_and_reversely(tmp_path: Path) -> None:
    class Body(torch.nn.Module):
        base_model_prefix = "body"

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

    class WithHead(torch.nn.Module):
        base_model_prefix = "body"

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Body(), torch.nn.Linear(2, 2)

    for given, other in ((Body, WithHead), (WithHead, Body)):
        saved = given()
        save_file(saved.state_dict(), tmp_path / "one.safetensors")
        module: Any = make(str(tmp_path / "one.safetensors"), other)
        find_weights_in(module, LocalStore(str(tmp_path)))
        load_weights(module)
        expected, found = (getattr(m, "body", m).layer.weight for m in (saved, module))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_adapters_keep_their_values(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    net = trained()
    path = save(tmp_path / "base", net)

    def adapted() -> Any:
        return get_peft_model(Net(), LoraConfig(r=2, target_modules=["first", "head"]))  # type: ignore[arg-type]

    module: Any = make(path, adapted)
    assert {n for n, p in module.named_parameters() if not p.is_meta} == {
        n for n, p in adapted().named_parameters() if p.requires_grad
    }
    find_weights_in(module, LocalStore(str(tmp_path)))
    load_weights(module)
    base = module.get_base_model()
    torch.testing.assert_close(base.head.base_layer.weight, net.head.weight)
    torch.testing.assert_close(base.norm.running_var, net.norm.running_var)
    assert not base.first.lora_B["default"].weight.any()
    assert base.first.lora_A["default"].weight.all()


def test_a_function_may_have_any_arguments(tmp_path: Path) -> None:
    def build(name: str, path: str, make: int) -> Net:
        assert (name, path) == ("a", "b")
        return Net(make)

    path = save(tmp_path / "base", trained(), without="head")
    estimator = TorchEstimator(
        **{"model": build, "model_args": {"name": "a", "path": "b", "make": 5}},
        **{"init_weights": path, "store": str(tmp_path)},
    )
    module: Any = TorchFramework.with_objects(estimator).getOrDefault("model")
    assert module.head.weight.shape == (5, 4)


def test_weights_of_other_types_become_those_of_the_model(tmp_path: Path) -> None:
    net = trained()
    path = str(tmp_path / "base.safetensors")
    save_file({n: v.bfloat16() for n, v in net.state_dict().items() if n != "last.weight"}, path)
    module = make(path)
    find_weights_in(module, LocalStore(str(tmp_path)))
    load_weights(module)
    weight = module.get_parameter("first.weight")
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight, net.first.weight.bfloat16().float(), rtol=0, atol=0)


def test_wrong_files_and_models_are_named(tmp_path: Path) -> None:
    path = save(tmp_path / "base", trained())
    with pytest.raises(ParamError, match=r"^init_weights: 'head\.weight' has shape \(3, 4\)"):
        make(path, head=7)
    with pytest.raises(ParamError, match=r"^init_weights: none of .* 'weight', is in the.*'norm\."):
        make(path, lambda: torch.nn.Linear(2, 2))
    with pytest.raises(ParamError, match=r"^init_weights: found no safetensors file at "):
        make(str(tmp_path / "none"))
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    with pytest.raises(StoreError, match=r"bad\.safetensors' is not a safetensors file"):
        make(str(tmp_path / "bad.safetensors"))

    class Copies(torch.nn.Module):
        """Layer that sets its parameters by itself."""

        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(4, 4)
            self.copy = torch.nn.Linear(4, 4)
            self.copy._parameters["weight"] = torch.nn.Parameter(self.first.weight.clone())

    with pytest.raises(ParamError, match=r"^model: the parameter 'copy\.weight' is not in the"):
        make(path, Copies)
    estimator = TorchEstimator(init_weights=path, store=str(tmp_path), model=Net())
    with pytest.raises(ParamError, match=r"^init_weights: found a Net as model"):
        TorchFramework.with_objects(estimator)


def test_pickles_hold_no_secret_of_the_store(tmp_path: Path) -> None:
    module = make(save(tmp_path / "base", trained()))
    store = LocalStore(str(tmp_path), storage_options={"token": "of-tests"})
    find_weights_in(module, store)
    weights = stored_weights(module)
    assert weights is not None
    assert weights.store is store
    assert copy.deepcopy(weights) is weights

    def loss(output: Any, label: Any) -> Any:
        return module(output) - label

    for value in (weights, module, loss):
        assert b"of-tests" not in cloudpickle.dumps(value)
        assert b"of-tests" not in dump_module((module, value))


def test_other_threads_make_layers_meanwhile(tmp_path: Path) -> None:
    path = save(tmp_path / "base", trained())
    begun, made = threading.Event(), threading.Event()

    def slow() -> Net:
        begun.set()
        assert made.wait(60)
        return Net()

    register = torch.nn.Module.register_parameter
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(make, path, slow)
        assert begun.wait(60)
        assert not torch.nn.Linear(1, 1).to("cpu").weight.is_meta
        second = pool.submit(make, path)
        made.set()
        assert first.result(60).first.weight.is_meta
        assert second.result(60).first.weight.is_meta
    assert torch.nn.Module.register_parameter is register


def test_the_index_tells_the_files(tmp_path: Path) -> None:
    folder = Path(save(tmp_path / "base", trained()))
    names = {path.name: [*load_file(path)] for path in folder.glob("*.safetensors")}
    index = {key: name for name, keys in names.items() for key in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    save_file({"first.weight": torch.zeros(4, 4)}, folder / "z-old.safetensors")
    module = make(str(folder))
    find_weights_in(module, LocalStore(str(tmp_path)))
    torch.testing.assert_close(load_weights(module).state_dict(), trained().state_dict())
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(StoreError, match=r"A file of init_weights is missing .*model-1"):
        make(str(folder))
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(StoreError, match=r"index\.json cannot be read"):
        make(str(folder))


def test_recurrent_layers_follow_their_weights(tmp_path: Path) -> None:
    save_file(torch.nn.GRU(2, 3).state_dict(), tmp_path / "one.safetensors")
    module = make(str(tmp_path / "one.safetensors"), lambda: torch.nn.GRU(2, 3))
    find_weights_in(module, LocalStore(str(tmp_path)))
    output, _ = load_weights(module)(torch.ones(1, 1, 2))
    assert output.isfinite().all()
    weights = load_file(tmp_path / "one.safetensors")
    torch.testing.assert_close(module.state_dict(), weights, rtol=0, atol=0)


def test_a_compiled_module_is_rejected(tmp_path: Path) -> None:
    path = save(tmp_path / "base", trained())
    with pytest.raises(ParamError, match=r"^init_weights: .*torch\.compile"):
        make(path, lambda: torch.compile(Net()))
