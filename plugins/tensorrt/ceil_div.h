#pragma once

#include <cstdint>

namespace dflash_trt {

inline std::int64_t ceilDiv(std::int64_t total, std::int64_t share) { return (total + share - 1) / share; }

}  // namespace dflash_trt
