#include "kernels.h"

#include <cstring>
#include <map>
#include <mutex>
#include <ostream>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include "error.h"

namespace dflash_trt {
namespace {

constexpr int kSharedBytesWithoutAsking = 48 * 1024;

bool same(const char* left, const char* right) { return std::strcmp(left, right) == 0; }

void write(std::ostream& out, const KernelKey& key) {
  out << "dtype " << (*key.dtype ? key.dtype : "any") << ", head_dim " << key.head_dim << ", features '" << key.features
      << "'";
}

std::string missing(const KernelKey& wanted, int architecture) {
  std::set<std::string> have;
  for (std::size_t i = 0; i < kKernelVariantCount; ++i) {
    const KernelVariant& variant = kKernelVariants[i];
    if (same(variant.kernel, wanted.kernel)) {
      std::ostringstream entry;
      entry << variant.compute_capability << "/" << variant.dtype << "/" << variant.head_dim << "/'" << variant.features
            << "'";
      have.insert(entry.str());
    }
  }
  std::ostringstream reason;
  reason << "no variant of " << wanted.kernel << " for compute capability " << architecture << ", ";
  write(reason, wanted);
  reason << "; this library has (capability/dtype/head_dim/features):";
  for (const std::string& entry : have) {
    reason << " " << entry;
  }
  if (have.empty()) {
    reason << " none";
  }
  return reason.str();
}

Kernel load(const KernelVariant& variant, const Device& device) {
  cudaLibrary_t library = nullptr;
  requireCuda(cudaLibraryLoadData(&library, variant.image, nullptr, nullptr, 0, nullptr, nullptr, 0), "loading cubin ",
              variant.symbol, " on device ", device.id);
  Kernel kernel{&variant, nullptr};
  requireCuda(cudaLibraryGetKernel(&kernel.handle, library, variant.symbol), "finding kernel ", variant.symbol,
              " in its cubin");
  // CUDA loads code at its first use unless asked for it, and the first use may fall into a stream capture.
  cudaFuncAttributes attributes{};
  requireCuda(cudaFuncGetAttributes(&attributes, kernel.handle), "loading kernel ", variant.symbol, " on device ",
              device.id);
  if (variant.shared_bytes > kSharedBytesWithoutAsking) {
    requireCuda(cudaFuncSetAttribute(kernel.handle, cudaFuncAttributeMaxDynamicSharedMemorySize, variant.shared_bytes),
                "asking for ", variant.shared_bytes, " bytes of shared memory for kernel ", variant.symbol);
    // The rest of what L1 and shared memory have in common is not used: as many programs as fit may run.
    requireCuda(cudaFuncSetAttribute(kernel.handle, cudaFuncAttributePreferredSharedMemoryCarveout,
                                     cudaSharedmemCarveoutMaxShared),
                "asking for the largest shared memory for kernel ", variant.symbol);
  }
  return kernel;
}

}  // namespace

const KernelVariant& chooseVariant(const KernelKey& key, int architecture, std::int64_t rows) {
  const KernelVariant* smallest_that_holds = nullptr;
  const KernelVariant* largest = nullptr;
  for (std::size_t i = 0; i < kKernelVariantCount; ++i) {
    const KernelVariant& variant = kKernelVariants[i];
    if (!same(variant.kernel, key.kernel) || variant.compute_capability != architecture ||
        !same(variant.dtype, key.dtype) || variant.head_dim != key.head_dim || !same(variant.features, key.features)) {
      continue;
    }
    if (variant.tile_rows >= rows &&
        (smallest_that_holds == nullptr || variant.tile_rows < smallest_that_holds->tile_rows)) {
      smallest_that_holds = &variant;
    }
    if (largest == nullptr || variant.tile_rows > largest->tile_rows) {
      largest = &variant;
    }
  }
  if (largest == nullptr) {
    throw Error(missing(key, architecture));
  }
  return smallest_that_holds != nullptr ? *smallest_that_holds : *largest;
}

Kernel loadKernel(const KernelVariant& variant, const Device& device) {
  static std::mutex mutex;
  static std::map<std::pair<const KernelVariant*, int>, Kernel> loaded;

  const std::lock_guard<std::mutex> lock(mutex);
  const std::pair<const KernelVariant*, int> key{&variant, device.id};
  auto found = loaded.find(key);
  if (found == loaded.end()) {
    found = loaded.emplace(key, load(variant, device)).first;
  }
  return found->second;
}

}  // namespace dflash_trt
