"""Damaged documents of saved models: errors that name the folder."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path

import pytest
from hypothesis import strategies as st
from json_values import (
    JSON_VALUES,
    NO_JSON,
    Effort,
    damaged_bytes,
    edited_anywhere,
    efforts,
    fuzz,
    typed_outcome,
)

from hvd_estimators import Store
from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.inference.standalone import load_predictor
from hvd_estimators.saving.saved import read_saved

METADATA = {
    "class": "hvd_estimators.torch.model.TorchModel",
    "timestamp": 1,
    "sparkVersion": "3.5.1",
    "uid": "TorchModel_1",
    "paramMap": {"feature_cols": ["features"]},
    "defaultParamMap": {"batch_size": 32},
    "formatVersion": 1,
    "paramsFolder": "params",
    "pickledParams": ["model"],
}


@pytest.mark.parametrize("effort", efforts(150, calls=2))
def test_damaged_metadata_of_a_saved_model_is_an_error_that_names_the_folder(
    effort: Effort, tmp_path: Path
) -> None:
    folder = tmp_path / "model" / "metadata"
    folder.mkdir(parents=True)
    path = str(folder.parent)
    text = json.dumps(METADATA).encode()
    changed = st.fixed_dictionaries({}, optional=dict.fromkeys(METADATA, JSON_VALUES)).map(
        lambda some: json.dumps({**METADATA, **some}).encode()
    )
    edited = edited_anywhere(METADATA).map(lambda found: json.dumps(found).encode())
    plain = changed | edited | damaged_bytes(text) | st.sampled_from(NO_JSON)
    compressed = damaged_bytes(gzip.compress(text, mtime=0))

    def check(content: bytes) -> None:
        file.write_bytes(content)
        saved = typed_outcome(lambda: read_saved(path), path)
        for name in ("feature_cols", "model") if saved else ():
            typed_outcome(partial(saved.get, name), path)
        if saved_class(content) != METADATA["class"]:
            with pytest.raises((StoreError, ParamError), match=path):
                load_predictor(path)

    file = folder / "part-00000"
    fuzz(check, plain, effort)
    file.unlink()
    file = folder / "part-00000.gz"
    fuzz(check, compressed, effort)


def saved_class(content: bytes) -> object:
    """Return the class in metadata; that of a whole model if it cannot be read here."""
    try:
        return json.loads(content)["class"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return METADATA["class"]


def test_a_saved_model_without_metadata_is_an_error(tmp_path: Path) -> None:
    Store.create(str(tmp_path)).write_text(f"{tmp_path}/model/metadata/_SUCCESS", "")
    with pytest.raises(StoreError, match="no saved model"):
        read_saved(f"{tmp_path}/model")
