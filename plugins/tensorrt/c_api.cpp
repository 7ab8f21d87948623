#include "c_api.h"

#include <exception>
#include <string>

#include "error.h"
#include "launch.h"

namespace dflash_trt {
namespace {

constexpr int kMaxNodes = 128;
constexpr int kWordBytes = 4;

thread_local std::string last_error;

template <typename Body>
int guardedCall(const char* function, Body&& body) noexcept {
  try {
    last_error.clear();
    body();
    return 0;
  } catch (const std::exception& error) {
    last_error = std::string(function) + ": " + error.what();
  } catch (...) {
    last_error = std::string(function) + ": unknown exception";
  }
  return 1;
}

void requireAtLeast(int least, const char* name, int value) {
  require(value >= least, name, " is ", value, "; it must be at least ", least);
}

int wordsOf(int row_bytes) {
  require(row_bytes > 0 && row_bytes % kWordBytes == 0, "row_bytes is ", row_bytes, "; it must be a multiple of ",
          kWordBytes);
  return row_bytes / kWordBytes;
}

Kernel kernelFor(const char* name) {
  const Device device = currentDevice();
  return loadKernel(chooseVariant({name}, device.architecture(), 1), device);
}

}  // namespace
}  // namespace dflash_trt

using namespace dflash_trt;

int dflash_trt_accept_path(const void* tokens, const void* choices, const void* visibility, const void* parents,
                           void* path, void* path_len, void* bonus, int batch, int nodes, int path_capacity,
                           void* stream) {
  return guardedCall("dflash_trt_accept_path", [&] {
    requireAtLeast(0, "batch", batch);
    // The kernel fills what is behind the path, and one program has as many threads for that as nodes.
    require(path_capacity >= 1 && path_capacity <= kMaxNodes, "path_capacity is ", path_capacity,
            "; it must be from 1 to ", kMaxNodes);
    require(nodes >= 1 && nodes <= kMaxNodes, "nodes is ", nodes, "; it must be from 1 to ", kMaxNodes);
    launchAcceptPath(kernelFor("accept_path"),
                     {tokens, choices, visibility, parents, path, path_len, bonus, nodes, path_capacity}, batch,
                     static_cast<cudaStream_t>(stream));
  });
}

int dflash_trt_move_rows(const void* buffers, int n_buffers, const void* path, const void* path_len,
                         const void* context_len, int batch, int kv_heads, int capacity, int row_bytes,
                         int path_stride, void* stream) {
  return guardedCall("dflash_trt_move_rows", [&] {
    requireAtLeast(0, "n_buffers", n_buffers);
    requireAtLeast(0, "batch", batch);
    requireAtLeast(1, "kv_heads", kv_heads);
    requireAtLeast(1, "capacity", capacity);
    requireAtLeast(1, "path_stride", path_stride);
    const int words = wordsOf(row_bytes);
    launchMoveRows(kernelFor("move_rows"),
                   {buffers, path, path_len, context_len, capacity, kv_heads, words, path_stride}, n_buffers, batch,
                   static_cast<cudaStream_t>(stream));
  });
}

int dflash_trt_gather_features(const void* features, const void* path, const void* path_len, void* output, int batch,
                               int nodes, int row_bytes, int path_stride, int out_rows, void* stream) {
  return guardedCall("dflash_trt_gather_features", [&] {
    requireAtLeast(0, "batch", batch);
    requireAtLeast(1, "nodes", nodes);
    requireAtLeast(1, "path_stride", path_stride);
    requireAtLeast(0, "out_rows", out_rows);
    const int words = wordsOf(row_bytes);
    launchGatherFeatures(kernelFor("gather_features"),
                         {features, path, path_len, output, nodes, words, path_stride, out_rows}, batch,
                         static_cast<cudaStream_t>(stream));
  });
}

const char* dflash_trt_last_error(void) { return last_error.c_str(); }

const char* dflash_trt_version(void) { return DFLASH_TRT_VERSION; }
