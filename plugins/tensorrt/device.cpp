#include "device.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

#include "error.h"

namespace dflash_trt {
namespace {

int attribute(cudaDeviceAttr which, int device, const char* name) {
  int value = 0;
  requireCuda(cudaDeviceGetAttribute(&value, which, device), "device ", device, ", ", name);
  return value;
}

}  // namespace

int Device::architecture() const {
  if (major == 8) {
    return 80;
  }
  require(minor == 0 && (major == 9 || major == 10 || major == 12), "device ", id, " has compute capability ", major,
          ".", minor, "; there are kernels for 8.x, 9.0, 10.0 and 12.0");
  return major * 10;
}

Device currentDevice() {
  static std::mutex mutex;
  static std::map<int, Device> known;

  int id = 0;
  requireCuda(cudaGetDevice(&id), "current device");
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(id);
  if (found == known.end()) {
    const Device device{id, attribute(cudaDevAttrComputeCapabilityMajor, id, "compute capability"),
                        attribute(cudaDevAttrComputeCapabilityMinor, id, "compute capability"),
                        attribute(cudaDevAttrMultiProcessorCount, id, "number of multiprocessors")};
    found = known.emplace(id, device).first;
  }
  return found->second;
}

}  // namespace dflash_trt
