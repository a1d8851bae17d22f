"""``horovod.spark``'s names for code and libraries that cannot change their imports.

``import hvd_estimators.compat``, before anything of ``horovod.spark`` is imported, makes these
names resolve to this package: in this process, in ranks, and in Python workers that predict with
models of this package, which import it by themselves. Where Horovod was installed by
``hvd-estimators build-horovod --with-compat`` no import is needed, in any process.

What ``horovod.spark`` had and this package leaves out raises a `LeftOutError`, which says what to
use instead. See ``docs/migrating.rst``.
"""

from __future__ import annotations

from hvd_estimators.compat.finder import install
from hvd_estimators.exceptions import LeftOutError

__all__ = ["LeftOutError", "install"]

install()
