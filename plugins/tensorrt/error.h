// Inside the library a broken rule is an exception with a one-line reason; it ends at the border (see border.h).
#pragma once

#include <cuda_runtime_api.h>

#include <sstream>
#include <stdexcept>

namespace dflash_trt {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream reason;
  (reason << ... << parts);
  throw Error(reason.str());
}

template <typename... Parts>
void require(bool rule, const Parts&... parts) {
  if (!rule) {
    fail(parts...);
  }
}

template <typename... Parts>
void requireCuda(cudaError_t status, const Parts&... what) {
  if (status != cudaSuccess) {
    cudaGetLastError();  // a later call must not be blamed for this one
    fail(what..., ": ", cudaGetErrorName(status), " (", cudaGetErrorString(status), ")");
  }
}

}  // namespace dflash_trt
