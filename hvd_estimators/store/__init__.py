"""Stores: where datasets, checkpoints and logs live."""

from __future__ import annotations

from hvd_estimators.store.base import RunPaths, Store
from hvd_estimators.store.local import LocalStore

__all__ = ["LocalStore", "RunPaths", "Store"]
