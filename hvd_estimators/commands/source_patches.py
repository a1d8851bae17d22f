"""Patches of Horovod's source before it is compiled, and the marker of a patched wheel.

Each patch replaces a text that occurs exactly once in Horovod 0.28.1:

* Gloo listens on the address in ``HVD_ESTIMATORS_GLOO_ADDRESS``. Without this variable it listens
  on the interface in ``HOROVOD_GLOO_IFACE``, for the first process set too. The release gives that
  process set no interface, so every rank uses the address of its host's name. The rank crashes if
  there is no such address, and cannot be reached if it is ``127.0.1.1``. An interface alone is not
  sufficient: Gloo uses its first address, which other ranks may not reach.
* A host name that does not resolve is an error with a message. The release uses uninitialised
  memory.
* The ranks of a process set are stored in a vector of the correct length. The release writes them
  behind the end of an empty vector. Horovod's check for stalled ranks uses the vector's length, and
  therefore found no ranks.
* Every request to the rendezvous server carries the job's secret from
  ``HVD_ESTIMATORS_RENDEZVOUS_TOKEN``.
* TensorFlow's stream itself provides its CUDA stream. The release declares a TensorFlow function
  for that, ``AsGpuStreamValue``, which current TensorFlow versions do not export. A module compiled
  for CUDA therefore cannot be loaded.
* A CPU build does not look for CUDA. The release looks for CUDA if torch has CUDA and there is an
  ``nvcc``, and fails without the rest of the toolkit.
* The copy assignment of flatbuffers' ``span`` is the default one. The release assigns to constant
  members and returns nothing. GCC 14 rejects that, although the function is never called.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

from hvd_estimators.exceptions import BuildError
from hvd_estimators.launch.versions import (
    ADDRESS_VARIABLE,
    MARKER,
    PATCHES_REVISION,
    TOKEN_VARIABLE,
)

__all__ = ["PATCHES", "SourcePatch", "patch_source", "unpack_source"]

_MARKER_TEXT = f'''\
"""Written by hvd-estimators build-horovod: the changes that this wheel was compiled with."""

REVISION = {PATCHES_REVISION}
'''


@dataclass(frozen=True)
class SourcePatch:
    """A change of one place in Horovod's source.

    Parameters
    ----------
    path : str
        The file, relative to the source's folder.
    before, after : str
        The text, which must occur exactly once, and its replacement.
    """

    path: str
    before: str
    after: str


_CONTEXT = "horovod/common/gloo/gloo_context.cc"
_STORE = "horovod/common/gloo/http_store.cc"
_DEVICE = "third_party/gloo/gloo/transport/{kind}/device.cc"
_TENSORFLOW_OPS = "horovod/tensorflow/mpi_ops.cc"
_SIGN = "// Changed by hvd-estimators build-horovod"

PATCHES = (
    SourcePatch(
        _CONTEXT,
        "int ParseNextInt(std::stringstream& ss) {\n",
        f"""\
{_SIGN}: the address goes before the interface.
static attr ListeningAttributes(const std::string& iface) {{
  attr device_attr;
  const char* address = std::getenv("{ADDRESS_VARIABLE}");
  if (address != nullptr && *address != '\\0') {{
    device_attr.hostname = address;
  }} else {{
    device_attr.iface = iface;
  }}
  device_attr.ai_family = AF_UNSPEC;
  return device_attr;
}}

int ParseNextInt(std::stringstream& ss) {{
""",
    ),
    SourcePatch(
        _CONTEXT,
        """\
  gloo_iface_ = gloo_iface;
  attr device_attr;
  device_attr.iface = gloo_iface_;

  device_attr.ai_family = AF_UNSPEC;
""",
        f"""\
  gloo_iface_ = gloo_iface;
  {_SIGN}
  attr device_attr = ListeningAttributes(gloo_iface_);
""",
    ),
    SourcePatch(
        _CONTEXT,
        """\
  }

  attr device_attr;
  device_attr.iface = gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
""",
        f"""\
  }}

  {_SIGN}: the interface is the global context's.
  gloo_iface_ = global_context.gloo_iface_;
  attr device_attr = ListeningAttributes(gloo_iface_);
""",
    ),
    *(
        SourcePatch(
            _DEVICE.format(kind=kind),
            """\
  auto rv = getaddrinfo(attr.hostname.data(), nullptr, &hints, &result);
  GLOO_ENFORCE_NE(rv, -1);
""",
            f"""\
  auto rv = getaddrinfo(attr.hostname.data(), nullptr, &hints, &result);
  {_SIGN}: no result may be used after an error.
  GLOO_ENFORCE_EQ(rv, 0, "Cannot resolve ", attr.hostname, ": ", gai_strerror(rv));
""",
        )
        for kind in ("tcp", "uv")
    ),
    SourcePatch(
        _STORE,
        "// Perform http request to rendezvous server with retry logic\n",
        f"""\
{_SIGN}
static std::vector<std::string> AuthorizationHeaders() {{
  const char* token = std::getenv("{TOKEN_VARIABLE}");
  if (token == nullptr || *token == '\\0') {{
    return {{}};
  }}
  return {{std::string("Authorization: Bearer ") + token}};
}}

// Perform http request to rendezvous server with retry logic
""",
    ),
    SourcePatch(
        _STORE,
        "request.send(method, body);",
        "request.send(method, body, AuthorizationHeaders());",
    ),
    SourcePatch(
        "horovod/common/gloo/gloo_controller.cc",
        "  global_ranks_.reserve(size_);\n",
        f"  {_SIGN}\n  global_ranks_.resize(size_);\n",
    ),
    SourcePatch(_STORE, "#include <cstring>\n", "#include <cstdlib>\n#include <cstring>\n"),
    SourcePatch(
        _TENSORFLOW_OPS,
        """\
// Forward declaration of AsGpuStreamValue
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream);
} // namespace stream_executor
} // namespace gpu
""",
        "",
    ),
    SourcePatch(
        _TENSORFLOW_OPS,
        """\
#include "tensorflow/stream_executor/stream.h"
#endif // TENSORFLOW_VERSION >= 2011000000
""",
        f"""\
#include "tensorflow/stream_executor/stream.h"
#endif // TENSORFLOW_VERSION >= 2011000000

{_SIGN}
namespace stream_executor {{
namespace gpu {{
static GpuStreamHandle AsGpuStreamValue(Stream* stream) {{
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}}
}} // namespace gpu
}} // namespace stream_executor
""",
    ),
    SourcePatch(
        "cmake/Modules/FindPytorch.cmake",
        """\
execute_process(COMMAND ${PY_EXE} -c "import torch; \
from torch.utils.cpp_extension import CUDA_HOME; \
print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)"
""",
        f"""\
{_SIGN.replace("//", "#")}
execute_process(COMMAND ${{PY_EXE}} -c "import os, torch; \
print(torch.version.cuda is not None and 'HOROVOD_GPU_OPERATIONS' in os.environ)"
""",
    ),
    SourcePatch(
        "third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
        """\
  FLATBUFFERS_CONSTEXPR_CPP14 span &operator=(const span &other)
      FLATBUFFERS_NOEXCEPT {
    data_ = other.data_;
    count_ = other.count_;
  }
""",
        f"""\
  {_SIGN}
  span &operator=(const span &other) = default;
""",
    ),
)


def unpack_source(archive: Path, folder: Path) -> Path:
    """Unpack a source distribution and return the folder of its ``setup.py``.

    Parameters
    ----------
    archive : Path
        A ``.tar.gz`` as pip downloads it.
    folder : Path
        An empty folder for the unpacked files.

    Raises
    ------
    BuildError
        If the archive cannot be read or is not a source distribution.
    """
    try:
        with tarfile.open(archive) as packed:
            if hasattr(tarfile, "data_filter"):
                packed.extractall(folder, filter="data")
            else:  # Python before 3.10.12 and 3.11.4
                packed.extractall(folder)
    except (tarfile.TarError, OSError) as error:
        raise BuildError(f"Horovod's source {archive} cannot be unpacked: {error}") from error
    found = next(iter(folder.glob("*/setup.py")), None)
    if found is None:
        raise BuildError(f"{archive} is not a source distribution: it contains no setup.py.")
    return found.parent


def patch_source(source: Path) -> None:
    """Patch Horovod's source, and mark the packages that are built from it.

    Parameters
    ----------
    source : Path
        The folder of Horovod's ``setup.py``.

    Raises
    ------
    BuildError
        If the source is not the version that the patches are for. In this case nothing is changed.
    """
    texts: dict[Path, str] = {}
    for patch in PATCHES:
        path = source / patch.path
        text = texts.get(path) or (path.read_text() if path.is_file() else "")
        count = text.count(patch.before)
        if count != 1:
            raise BuildError(
                f"Horovod's source differs from the release: {patch.path} has {count} times, not "
                f"once, the text to patch:\n{patch.before}\nBuild the release that pip finds on "
                "PyPI, not a changed one."
            )
        texts[path] = text.replace(patch.before, patch.after)
    for path, text in texts.items():
        path.write_text(text)
    (source / MARKER).write_text(_MARKER_TEXT)
