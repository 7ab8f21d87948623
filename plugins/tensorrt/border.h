// The border to TensorRT is noexcept: an exception becomes one logged line and the given error result.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "logger.h"

namespace dflash_trt {

inline void report(const char* object, const char* method, const char* reason) noexcept {
  try {
    log(Severity::kERROR, std::string("dflash_trt ") + object + "::" + method + ": " + reason);
  } catch (...) {
    // Out of memory while telling of an error: the error result still says that there was one.
  }
}

template <typename Result, typename Body>
Result guarded(const char* object, const char* method, Result on_error, Body&& body) noexcept {
  try {
    return std::forward<Body>(body)();
  } catch (const std::exception& error) {
    report(object, method, error.what());
  } catch (...) {
    report(object, method, "unknown exception");
  }
  return on_error;
}

}  // namespace dflash_trt
