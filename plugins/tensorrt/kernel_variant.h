// One compiled kernel as the ahead-of-time step embeds it: `embedded_kernels.cpp` defines the table declared here.
#pragma once

#include <cstddef>

namespace dflash_trt {

struct KernelVariant {
  const char* kernel;  // "kv_injection", "staircase_context", "staircase_merge", "accept_path", "move_rows",
                       // "gather_features"
  int compute_capability;  // 80, 90, 100, 120
  const char* dtype;       // "fp16", "bf16", "fp32"; "" where the kernel does not depend on it
  int head_dim;            // 64, 96, 128, 256; 0 where it does not matter
  const char* features;    // kv_injection: "" or "partial" (rotary dim < head_dim); staircase_context: "", "window" or
                           // "softcap" (which handles windows too); else ""
  int tile_rows;           // rows of a program's tile: cache rows, (head, query) rows, path rows; 0 where it does not
                           // matter
  int tile_columns;        // staircase_context: context slots per inner step; else 0
  const char* symbol;      // entry name in the cubin
  int num_warps;           // a block has 32 * num_warps threads
  int shared_bytes;        // dynamic shared memory
  const unsigned char* image;  // the cubin
  std::size_t image_size;
};

extern const KernelVariant kKernelVariants[];
extern const std::size_t kKernelVariantCount;

}  // namespace dflash_trt
