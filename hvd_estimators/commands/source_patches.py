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
* The background thread coordinates as soon as a tensor is added. The release sleeps until a cycle
  of 1 ms has passed. Tensors that follow within microseconds share the round. If other ranks lack
  a tensor, the next round starts after 0.4 ms. Without tensors it starts after 5 ms, or after 1 ms
  if there are several process sets, because their rounds wait for all ranks.
  ``HOROVOD_CYCLE_TIME``, autotuning and XLA operations select the release's cycle.
* Ranks agree in one step which tensors all of them have: each sends its bits to all others. The
  release sends the bits around a ring twice. Gloo reduces small tensors in the same way. Every rank
  sums them in the order of the ranks, so that all ranks have the same result.
* Gloo's thread yields its processor if another thread is sending. The release polls until the
  operating system takes the processor away, after 4 ms for example, although the other thread may
  need it.
* torch's ``synchronize`` sleeps until its result exists. The release polls without a pause, and
  takes processor time from the thread that computes the result.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

from hvd_estimators.exceptions import BuildError
from hvd_estimators.launch.horovod_build import MARKER, PATCHES_REVISION
from hvd_estimators.launch.rendezvous.client import ADDRESS_VARIABLE, TOKEN_VARIABLE

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
_CONTROLLER = "horovod/common/gloo/gloo_controller.cc"
_GLOO_OPERATIONS = "horovod/common/ops/gloo_operations.cc"
_STORE = "horovod/common/gloo/http_store.cc"
_DEVICE = "third_party/gloo/gloo/transport/{kind}/device.cc"
_PAIR = "third_party/gloo/gloo/transport/tcp/pair.cc"
_TENSORFLOW_OPS = "horovod/tensorflow/mpi_ops.cc"
_OPERATIONS = "horovod/common/operations.cc"
_QUEUE = "horovod/common/tensor_queue"
_HANDLES = "horovod/torch/handle_manager"
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

{_SIGN}
void ReduceDirectly(const std::shared_ptr<gloo::Context>& context, void* data,
                    size_t count, size_t element_size,
                    const gloo::AllreduceOptions::Func& reduce) {{
  // Gloo's own operations use the prefixes from 1 to 8.
  constexpr uint8_t kPrefix = 0x7f;
  const int size = context->size;
  const size_t bytes = count * element_size;
  std::unique_ptr<uint8_t[]> all(new uint8_t[bytes * size]);
  std::memcpy(all.get() + context->rank * bytes, data, bytes);
  auto buffer = context->createUnboundBuffer(all.get(), bytes * size);
  const auto slot = gloo::Slot::build(kPrefix, 0);
  for (int i = 1; i < size; ++i) {{
    const int source = (context->rank + size - i) % size;
    buffer->recv(source, slot, source * bytes, bytes);
  }}
  for (int i = 1; i < size; ++i) {{
    buffer->send((context->rank + i) % size, slot, context->rank * bytes, bytes);
  }}
  for (int i = 1; i < size; ++i) {{
    buffer->waitRecv(context->getTimeout());
  }}
  for (int i = 1; i < size; ++i) {{
    buffer->waitSend(context->getTimeout());
  }}
  std::memcpy(data, all.get(), bytes);
  for (int rank = 1; rank < size; ++rank) {{
    reduce(data, data, all.get() + rank * bytes, count);
  }}
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
    SourcePatch(_PAIR, "#include <sstream>\n", "#include <sstream>\n#include <thread>\n"),
    SourcePatch(
        _PAIR,
        """\
  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);
  if (!lock) {
    return;
""",
        f"""\
  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);
  if (!lock) {{
    {_SIGN}: the thread with the lock may need this processor.
    std::this_thread::yield();
    return;
""",
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
        _CONTROLLER,
        "  global_ranks_.reserve(size_);\n",
        f"  {_SIGN}\n  global_ranks_.resize(size_);\n",
    ),
    SourcePatch(
        "horovod/common/gloo/gloo_context.h",
        """\
#include "gloo/context.h"

#include "../common.h"
""",
        """\
#include <cstring>
#include <memory>

#include "gloo/allreduce.h"
#include "gloo/context.h"

#include "../common.h"
""",
    ),
    SourcePatch(
        "horovod/common/gloo/gloo_context.h",
        "struct GlooContext {\n",
        f"""\
{_SIGN}
// Reduces data in place, in one step: each rank sends its data to all others, and reduces
// all of them in the order of the ranks. The data must have the same size on all ranks.
void ReduceDirectly(const std::shared_ptr<gloo::Context>& context, void* data,
                    size_t count, size_t element_size,
                    const gloo::AllreduceOptions::Func& reduce);

struct GlooContext {{
""",
    ),
    *(
        SourcePatch(
            _CONTROLLER,
            f"""\
  gloo::AllreduceOptions opts(gloo_context_.ctx);
  opts.setOutput(bitvector.data(), count);
  void (*func)(void*, const void*, const void*, size_t) = &Bit{operation}<long long>;
  opts.setReduceFunction(gloo::AllreduceOptions::Func(func));
  gloo::allreduce(opts);
""",
            f"""\
  {_SIGN}
  void (*func)(void*, const void*, const void*, size_t) = &Bit{operation}<long long>;
  ReduceDirectly(gloo_context_.ctx, bitvector.data(), count, sizeof(long long), func);
""",
        )
        for operation in ("And", "Or")
    ),
    SourcePatch(
        _GLOO_OPERATIONS,
        """\
  if (reduce_op == ReduceOp::SUM) {
    void (*func)(void*, const void*, const void*, size_t) = &::gloo::sum<T>;
    opts.setReduceFunction(gloo::AllreduceOptions::Func(func));
   } else if (reduce_op == ReduceOp::MIN) {
    void (*func)(void*, const void*, const void*, size_t) = &::gloo::min<T>;
    opts.setReduceFunction(gloo::AllreduceOptions::Func(func));
   } else if (reduce_op == ReduceOp::MAX) {
    void (*func)(void*, const void*, const void*, size_t) = &::gloo::max<T>;
    opts.setReduceFunction(gloo::AllreduceOptions::Func(func));
   } else if (reduce_op == ReduceOp::PRODUCT) {
    void (*func)(void*, const void*, const void*, size_t) = &::gloo::product<T>;
    opts.setReduceFunction(gloo::AllreduceOptions::Func(func));
   }

  gloo::allreduce(opts);
""",
        f"""\
  {_SIGN}: small tensors are reduced in one step.
  void (*func)(void*, const void*, const void*, size_t) = &::gloo::sum<T>;
  if (reduce_op == ReduceOp::MIN) {{
    func = &::gloo::min<T>;
  }} else if (reduce_op == ReduceOp::MAX) {{
    func = &::gloo::max<T>;
  }} else if (reduce_op == ReduceOp::PRODUCT) {{
    func = &::gloo::product<T>;
  }}
  constexpr size_t kDirectBytes = 256 * 1024;
  if (num_elements * sizeof(T) * gloo_context_->ctx->size <= kDirectBytes) {{
    ReduceDirectly(gloo_context_->ctx, buffer_data, num_elements, sizeof(T), func);
    return;
  }}
  opts.setReduceFunction(gloo::AllreduceOptions::Func(func));
  gloo::allreduce(opts);
""",
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
    SourcePatch(
        f"{_QUEUE}.h",
        """\
#include <iostream>
#include <mutex>
#include <queue>
""",
        """\
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <iostream>
#include <mutex>
#include <queue>
""",
    ),
    SourcePatch(
        f"{_QUEUE}.h",
        """\
class TensorQueue {
public:
  TensorQueue() = default;
  TensorQueue(const TensorQueue&) = delete;
""",
        f"""\
{_SIGN}: the background thread sleeps until there is work.
class WorkSignal {{
public:
  // A tensor was added to a queue, or a shutdown was requested.
  void Notify();

  // A thread waits for a result from BeginWait() to EndWait(). It adds no tensor meanwhile.
  void BeginWait();
  void EndWait();

  // Sleeps until Notify(), but not longer than the limit. After a notification, sleeps until no
  // tensor follows within a few microseconds, or until a thread waits for a result.
  void Wait(std::chrono::microseconds limit);

private:
  std::mutex mutex_;
  std::condition_variable notified_;
  std::condition_variable needed_;
  std::uint64_t notifications_ = 0;
  std::uint64_t seen_ = 0;
  int waiting_ = 0;
}};

// Horovod's libraries for torch and for TensorFlow may share a process, but no threads.
extern WorkSignal work_signal __attribute__((visibility("hidden")));

class TensorQueue {{
public:
  TensorQueue() = default;
  TensorQueue(const TensorQueue&) = delete;

  // Whether there are tensors that are not reduced yet, sent to the coordinator or not.
  bool HasTensors() const;

""",
    ),
    SourcePatch(
        f"{_QUEUE}.cc",
        """\
// Add a TensorTableEntry as well as its message to the queue.
""",
        f"""\
{_SIGN}
WorkSignal work_signal;

static const auto kPause = std::chrono::microseconds(50);
static const auto kLongestPause = std::chrono::microseconds(300);

void WorkSignal::Notify() {{
  std::lock_guard<std::mutex> guard(mutex_);
  ++notifications_;
  notified_.notify_one();
}}

void WorkSignal::BeginWait() {{
  std::lock_guard<std::mutex> guard(mutex_);
  ++waiting_;
  needed_.notify_one();
}}

void WorkSignal::EndWait() {{
  std::lock_guard<std::mutex> guard(mutex_);
  --waiting_;
}}

void WorkSignal::Wait(std::chrono::microseconds limit) {{
  std::unique_lock<std::mutex> lock(mutex_);
  notified_.wait_for(lock, limit, [this] {{ return notifications_ != seen_; }});
  auto end = std::chrono::steady_clock::now() + kLongestPause;
  while (notifications_ != seen_) {{
    seen_ = notifications_;
    if (needed_.wait_for(lock, kPause, [this] {{ return waiting_ > 0; }}) ||
        std::chrono::steady_clock::now() >= end) {{
      seen_ = notifications_;
    }}
  }}
}}

bool TensorQueue::HasTensors() const {{
  std::lock_guard<std::mutex> guard(mutex_);
  return !tensor_table_.empty();
}}

// Add a TensorTableEntry as well as its message to the queue.
""",
    ),
    SourcePatch(
        f"{_QUEUE}.cc",
        """\
  message_queue_.push(std::move(message));
  return Status::OK();
""",
        f"""\
  message_queue_.push(std::move(message));
  {_SIGN}
  work_signal.Notify();
  return Status::OK();
""",
    ),
    SourcePatch(
        f"{_QUEUE}.cc",
        """\
    message_queue_.push(std::move(messages[i]));
  }
  return Status::OK();
""",
        f"""\
    message_queue_.push(std::move(messages[i]));
  }}
  {_SIGN}
  work_signal.Notify();
  return Status::OK();
""",
    ),
    SourcePatch(
        "horovod/common/global_state.h",
        "  bool enable_async_completion = false;\n",
        f"""\
  bool enable_async_completion = false;

  {_SIGN}: whether added tensors start a round, instead of a clock.
  bool is_event_driven = false;
""",
    ),
    SourcePatch(
        _OPERATIONS,
        """\
    state.parameter_manager.SetAutoTuning(true);
  }
""",
        f"""\
    state.parameter_manager.SetAutoTuning(true);
  }}

  {_SIGN}
  state.is_event_driven = horovod_cycle_time == nullptr && !enable_xla_ops &&
                          !state.parameter_manager.IsAutoTuning();
""",
    ),
    SourcePatch(
        _OPERATIONS,
        """\
bool RunLoopOnce(HorovodGlobalState& state) {
  // This delay determines thread frequency and communication message latency
  auto start_time = std::chrono::steady_clock::now();
  auto sleep_duration = state.last_cycle_start +
                        std::chrono::microseconds(long(
                            state.parameter_manager.CycleTimeMs() * 1000.)) -
                        start_time;
  if (sleep_duration > std::chrono::steady_clock::duration::zero()) {
    std::this_thread::sleep_for(sleep_duration);
  }
""",
        f"""\
{_SIGN}
static std::chrono::microseconds LongestSleep(HorovodGlobalState& state) {{
  auto ids = state.process_set_table.Ids();
  for (auto id : ids) {{
    if (state.process_set_table.Get(id).tensor_queue.HasTensors()) {{
      return std::chrono::microseconds(400);
    }}
  }}
  // Each round of a process set waits for the ranks outside it, too.
  bool is_waited_for = ids.size() > 1 || state.dynamic_process_sets;
  return std::chrono::microseconds(is_waited_for ? 1000 : 5000);
}}

bool RunLoopOnce(HorovodGlobalState& state) {{
  // This delay determines thread frequency and communication message latency
  auto start_time = std::chrono::steady_clock::now();
  auto sleep_duration = state.last_cycle_start +
                        std::chrono::microseconds(long(
                            state.parameter_manager.CycleTimeMs() * 1000.)) -
                        start_time;
  {_SIGN}
  if (state.is_event_driven) {{
    work_signal.Wait(LongestSleep(state));
  }} else if (sleep_duration > std::chrono::steady_clock::duration::zero()) {{
    std::this_thread::sleep_for(sleep_duration);
  }}
""",
    ),
    SourcePatch(
        _OPERATIONS,
        """\
    horovod_global.timeline.Shutdown();
    horovod_global.shut_down = true;
""",
        f"""\
    horovod_global.timeline.Shutdown();
    horovod_global.shut_down = true;
    {_SIGN}
    work_signal.Notify();
""",
    ),
    SourcePatch(
        f"{_HANDLES}.h",
        """\
#include <atomic>
#include <memory>
""",
        """\
#include <atomic>
#include <condition_variable>
#include <memory>
""",
    ),
    SourcePatch(
        f"{_HANDLES}.h",
        "  bool PollHandle(int handle);\n",
        f"""\
  bool PollHandle(int handle);
  {_SIGN}: returns when the handle has a result or is cleared.
  void Wait(int handle);
""",
    ),
    SourcePatch(
        f"{_HANDLES}.h",
        "  std::mutex mutex_;\n",
        f"  std::mutex mutex_;\n  {_SIGN}\n  std::condition_variable done_;\n",
    ),
    SourcePatch(
        f"{_HANDLES}.cc",
        '#include "handle_manager.h"\n',
        '#include "handle_manager.h"\n\n#include "../common/tensor_queue.h"\n',
    ),
    SourcePatch(
        f"{_HANDLES}.cc",
        """\
  results_[handle] = std::make_shared<Status>(status);
}
""",
        f"""\
  results_[handle] = std::make_shared<Status>(status);
  {_SIGN}
  done_.notify_all();
}}

void HandleManager::Wait(int handle) {{
  std::unique_lock<std::mutex> lock(mutex_);
  auto is_done = [this, handle] {{
    auto result = results_.find(handle);
    return result == results_.end() || result->second != nullptr;
  }};
  if (!is_done()) {{
    work_signal.BeginWait();
    done_.wait(lock, is_done);
    work_signal.EndWait();
  }}
}}
""",
    ),
    SourcePatch(
        f"{_HANDLES}.cc",
        "  results_.clear();\n",
        f"  results_.clear();\n  {_SIGN}\n  done_.notify_all();\n",
    ),
    SourcePatch(
        "horovod/torch/mpi_ops_v2.cc",
        """\
  while (true) {
    if (handle_manager.PollHandle(handle)) break;
    {
      py::gil_scoped_release release_python_gil;
      std::this_thread::yield();
    }
  }
""",
        f"""\
  {_SIGN}
  if (!handle_manager.PollHandle(handle)) {{
    py::gil_scoped_release release_python_gil;
    handle_manager.Wait(handle);
  }}
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
            else:  # Python before 3.11.4
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
