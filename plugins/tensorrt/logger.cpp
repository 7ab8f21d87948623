#include "logger.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <mutex>

namespace dflash_trt {
namespace {

// TensorRT 11 put IVersionedInterface under ILoggerFinder and ILogger: their first method comes after its four vtable
// entries there (two methods, two destructors), and first of all in 10. Nothing else that a plugin touches moved, so a
// library built with the headers of one version loads in the other. Hence calls by entry and not by class.
constexpr int kEntriesOfVersionedInterface = 4;

template <typename Result, typename... Arguments>
Result callFirstMethod(void* object, bool versioned, Arguments... arguments) {
  void* const* vtable = *static_cast<void* const**>(object);
  void* method = vtable[versioned ? kEntriesOfVersionedInterface : 0];
  return reinterpret_cast<Result (*)(void*, Arguments...)>(method)(object, arguments...);
}

// What the library of the runtime that called setLoggerFinder offers.
struct Runtime {
  void* finder = nullptr;
  bool versioned_loggers = NV_TENSORRT_MAJOR >= 11;
  void* (*global_logger)() = nullptr;
};

Runtime runtimeOf(void* finder) noexcept {
  Runtime runtime;
  runtime.finder = finder;
  // The finder's vtable lies in the runtime's own library.
  Dl_info info{};
  if (finder == nullptr || dladdr(*static_cast<void**>(finder), &info) == 0 || info.dli_fname == nullptr) {
    return runtime;
  }
  if (void* library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD)) {
    if (void* version = dlsym(library, "getInferLibMajorVersion")) {
      runtime.versioned_loggers = reinterpret_cast<std::int32_t (*)()>(version)() >= 11;
    }
    runtime.global_logger = reinterpret_cast<void* (*)()>(dlsym(library, "getLogger"));
    dlclose(library);
  }
  return runtime;
}

std::mutex runtime_mutex;
Runtime the_runtime;

Runtime currentRuntime() {
  const std::lock_guard<std::mutex> lock(runtime_mutex);
  return the_runtime;
}

// The logger of the engine that called the plugin; outside of engines the one the process gave TensorRT.
void* findLogger(const Runtime& runtime) {
  void* logger = nullptr;
  if (runtime.finder != nullptr) {
    logger = callFirstMethod<void*>(runtime.finder, runtime.versioned_loggers);
  }
  return logger == nullptr && runtime.global_logger != nullptr ? runtime.global_logger() : logger;
}

bool logThroughRuntime(Severity severity, const char* message) {
  const Runtime runtime = currentRuntime();
  void* logger = findLogger(runtime);
  if (logger == nullptr) {
    return false;
  }
  callFirstMethod<void>(logger, runtime.versioned_loggers, severity, message);
  return true;
}

}  // namespace

void setFinder(nvinfer1::ILoggerFinder* finder) noexcept {
  const Runtime runtime = runtimeOf(finder);
  const std::lock_guard<std::mutex> lock(runtime_mutex);
  the_runtime = runtime;
}

void log(Severity severity, const std::string& message) noexcept {
  try {
    if (logThroughRuntime(severity, message.c_str())) {
      return;
    }
  } catch (...) {
    // A logger that throws must not take the engine down; stderr it is.
  }
  if (severity <= Severity::kERROR) {
    std::fprintf(stderr, "%s\n", message.c_str());
  }
}

}  // namespace dflash_trt
