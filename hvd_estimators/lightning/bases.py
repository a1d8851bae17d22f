"""Stand-ins for the classes of Lightning's that ours are derived from; see `of_flavor`.

They are empty, so that importing our classes imports none of Lightning's packages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = [
    "Callback",
    "Checkpoint",
    "CheckpointIO",
    "ClusterEnvironment",
    "LightningModule",
    "ParallelStrategy",
    "ResultCollection",
]

if TYPE_CHECKING:
    from lightning_fabric.plugins import CheckpointIO, ClusterEnvironment
    from pytorch_lightning import Callback, LightningModule
    from pytorch_lightning.callbacks import Checkpoint
    from pytorch_lightning.strategies import ParallelStrategy
    from pytorch_lightning.trainer.connectors.logger_connector.result import (
        _ResultCollection as ResultCollection,
    )
else:

    def _stand_in(name: str, path: str) -> type:
        return type(name, (), {"__module__": __name__, "lightning_base": path})

    Callback = _stand_in("Callback", "Callback")
    Checkpoint = _stand_in("Checkpoint", "callbacks.Checkpoint")
    CheckpointIO = _stand_in("CheckpointIO", "fabric.plugins.CheckpointIO")
    ClusterEnvironment = _stand_in("ClusterEnvironment", "fabric.plugins.ClusterEnvironment")
    LightningModule = _stand_in("LightningModule", "LightningModule")
    ParallelStrategy = _stand_in("ParallelStrategy", "strategies.ParallelStrategy")
    ResultCollection = _stand_in(
        "ResultCollection", "trainer.connectors.logger_connector.result._ResultCollection"
    )
