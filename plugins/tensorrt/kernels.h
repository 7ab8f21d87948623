// From what a call needs to a kernel that can be launched.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device.h"
#include "kernel_variant.h"

namespace dflash_trt {

struct KernelKey {
  const char* kernel;
  const char* dtype = "";
  int head_dim = 0;
  const char* features = "";
};

struct Kernel {
  const KernelVariant* variant = nullptr;
  cudaKernel_t handle = nullptr;
};

// Of the variants with this key the one with the smallest tile that holds `rows`, else with the largest tile.
// Throws with the key and what there is instead.
const KernelVariant& chooseVariant(const KernelKey& key, int architecture, std::int64_t rows);

// Loads the variant's cubin on the device, once per process; later calls only look it up.
Kernel loadKernel(const KernelVariant& variant, const Device& device);

}  // namespace dflash_trt
