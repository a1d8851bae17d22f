"""Names of ``horovod.spark`` for code and libraries that cannot change their imports.

Import ``hvd_estimators.compat`` before any part of ``horovod.spark``. The names then resolve to
this package: in this process, in ranks, and in Python workers that predict with models of this
package. Ranks and Python workers import this module by themselves. No import is needed if
``hvd-estimators build-horovod --with-compat`` installed Horovod.

Names of ``horovod.spark`` that this package leaves out raise a `LeftOutError`, which suggests a
replacement. See ``docs/migrating.rst``.
"""

from __future__ import annotations

from hvd_estimators.compat.finder import install
from hvd_estimators.exceptions import LeftOutError

__all__ = ["LeftOutError", "install"]

install()
