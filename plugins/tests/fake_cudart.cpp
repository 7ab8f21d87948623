// A stand-in for the CUDA runtime, to be preloaded: it has the devices that FAKE_CUDART_DEVICES names, records what is
// loaded and launched as JSON lines on stdout, and answers success. It checks geometry and arguments, not device code.
//
//   FAKE_CUDART_DEVICES     "90:132,86:80": compute capability and multiprocessors of each device
//   FAKE_CUDART_SIGNATURES  file with lines "symbol PPifP": the kernels' parameters (pointer, int, float)
//   FAKE_CUDART_FAIL        "cudaLaunchKernel:719": this function fails with this error
//   FAKE_CUDART_CAPTURING   1: a stream is being captured, so only what a capture allows succeeds
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "json.h"

namespace {

using test::Line;

struct Library {
  std::string image;
  std::uint32_t checksum;
};
struct FakeKernel {
  std::string symbol;
  std::string parameters;
  std::uint32_t checksum;  // of the cubin: many have a kernel of the same name
};

template <typename Value>
std::uint64_t at(const char* image, std::size_t offset) {
  Value value;
  std::memcpy(&value, image + offset, sizeof value);
  return value;
}

// A cubin is an ELF file, whose headers tell its length; the tests' own are text.
std::size_t lengthOf(const char* image) {
  if (std::memcmp(image, "\x7f" "ELF", 4) != 0) {
    return std::strlen(image);
  }
  const auto end_of_table = [image](std::size_t offset, std::size_t entry_size, std::size_t entries) {
    return at<std::uint64_t>(image, offset) + at<std::uint16_t>(image, entry_size) * at<std::uint16_t>(image, entries);
  };
  return std::max(end_of_table(32, 54, 56), end_of_table(40, 58, 60));  // program and section headers
}

std::uint32_t crc32(const std::string& bytes) {
  std::uint32_t crc = ~0U;
  for (const unsigned char byte : bytes) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320U : 0);
    }
  }
  return ~crc;
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

cudaError_t outcome(const char* function, bool allowed_in_capture = false) {
  const std::string fail = environment("FAKE_CUDART_FAIL");
  const std::size_t colon = fail.find(':');
  if (colon != std::string::npos && fail.substr(0, colon) == function) {
    return static_cast<cudaError_t>(std::stoi(fail.substr(colon + 1)));
  }
  if (!allowed_in_capture && environment("FAKE_CUDART_CAPTURING") == "1") {
    return cudaErrorStreamCaptureUnsupported;
  }
  return cudaSuccess;
}

struct FakeDevice {
  int capability;
  int multiprocessors;
};

std::vector<FakeDevice> devices() {
  std::vector<FakeDevice> result;
  std::istringstream entries(environment("FAKE_CUDART_DEVICES"));
  for (std::string entry; std::getline(entries, entry, ',');) {
    const std::size_t colon = entry.find(':');
    result.push_back({std::stoi(entry.substr(0, colon)), std::stoi(entry.substr(colon + 1))});
  }
  return result;
}

std::string parametersOf(const std::string& symbol) {
  std::ifstream file(environment("FAKE_CUDART_SIGNATURES"));
  for (std::string name, parameters; file >> name >> parameters;) {
    if (name == symbol) {
      return parameters;
    }
  }
  return "";
}

thread_local int current_device = 0;

}  // namespace

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return outcome("cudaGetDevice", true);
}

cudaError_t cudaSetDevice(int device) {
  current_device = device;
  return outcome("cudaSetDevice", true);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const FakeDevice known = devices().at(device);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = known.capability / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = known.capability % 10;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = known.multiprocessors;
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return outcome("cudaDeviceGetAttribute", true);
}

const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheStandIn"; }
const char* cudaGetErrorString(cudaError_t error) {
  thread_local std::string text;
  text = "error " + std::to_string(static_cast<int>(error));
  return text.c_str();
}
cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void* code, cudaJitOption*, void**, unsigned int,
                                cudaLibraryOption*, void**, unsigned int) {
  const cudaError_t result = outcome("cudaLibraryLoadData");
  if (result == cudaSuccess) {
    const auto* image = static_cast<const char*>(code);
    const std::string bytes(image, lengthOf(image));
    *library = reinterpret_cast<cudaLibrary_t>(new Library{bytes, crc32(bytes)});
    Line("load_library").add("device", current_device);
  }
  return result;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t library, const char* name) {
  const cudaError_t result = outcome("cudaLibraryGetKernel");
  if (result == cudaSuccess) {
    const auto& loaded = *reinterpret_cast<const Library*>(library);
    if (loaded.image.find(name) == std::string::npos) {
      return cudaErrorSymbolNotFound;
    }
    *kernel = reinterpret_cast<cudaKernel_t>(new FakeKernel{name, parametersOf(name), loaded.checksum});
    Line("get_kernel").text("symbol", name);
  }
  return result;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  return outcome("cudaFuncGetAttributes");
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  const cudaError_t result = outcome("cudaFuncSetAttribute");
  if (result == cudaSuccess) {
    Line("set_attribute")
        .text("symbol", static_cast<const FakeKernel*>(function)->symbol)
        .add("attribute", static_cast<int>(attribute))
        .add("value", value);
  }
  return result;
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, std::size_t shared_bytes,
                             cudaStream_t stream) {
  const cudaError_t result = outcome("cudaLaunchKernel", true);
  if (result != cudaSuccess) {
    return result;
  }
  const auto& kernel = *static_cast<const FakeKernel*>(function);
  std::vector<std::string> values;
  for (std::size_t i = 0; i < kernel.parameters.size(); ++i) {
    std::ostringstream value;
    value.precision(9);
    switch (kernel.parameters[i]) {
      case 'P':
        value << *static_cast<const std::uintptr_t*>(arguments[i]);
        break;
      case 'i':
        value << *static_cast<const std::int32_t*>(arguments[i]);
        break;
      default:
        value << *static_cast<const float*>(arguments[i]);
    }
    values.push_back(value.str());
  }
  Line("launch")
      .text("symbol", kernel.symbol)
      .add("image", kernel.checksum)
      .add("grid", test::list(std::vector<unsigned>{grid.x, grid.y, grid.z}))
      .add("block", test::list(std::vector<unsigned>{block.x, block.y, block.z}))
      .add("shared_bytes", shared_bytes)
      .add("stream", reinterpret_cast<std::uintptr_t>(stream))
      .add("arguments", test::list(values));
  return cudaSuccess;
}

// Memory of the host, since nothing runs; aligned as cudaMalloc aligns.
cudaError_t cudaMalloc(void** memory, std::size_t size) {
  *memory = std::aligned_alloc(256, (size + 511) / 256 * 256);
  return outcome("cudaMalloc");
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return outcome("cudaFree");
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t size, cudaMemcpyKind) {
  std::memcpy(to, from, size);
  return outcome("cudaMemcpy");
}
cudaError_t cudaMemset(void* memory, int value, std::size_t size) {
  std::memset(memory, value, size);
  return outcome("cudaMemset");
}
cudaError_t cudaDeviceSynchronize() { return outcome("cudaDeviceSynchronize"); }

}  // extern "C"
