#pragma once

#include <cstdint>

#include "error.h"
#include "signature.h"

namespace dflash_trt {

inline void requireHeadDim(std::int64_t head_dim) {
  const bool known = head_dim == 64 || head_dim == 96 || head_dim == 128 || head_dim == 256;
  require(known || head_dim == kUnknown, "head_dim is ", head_dim, "; it must be 64, 96, 128 or 256");
}

}  // namespace dflash_trt
