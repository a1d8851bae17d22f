"""Large content as a file of this machine, which is gone when nobody holds it any more."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref

__all__ = ["LocalFile"]


class LocalFile(os.PathLike[str]):
    """A temporary file that is deleted with the object. It does not cross between processes.

    Attributes
    ----------
    path : str
        The file, which is not there yet, in a folder of its own.
    """

    def __init__(self) -> None:
        directory = tempfile.mkdtemp(prefix="hvd_estimators-")
        self.path = os.path.join(directory, "content")
        self._delete = weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)

    def __fspath__(self) -> str:
        return self.path

    def close(self) -> None:
        """Delete the file."""
        self._delete()
