#include "tiling.h"

#include <algorithm>

#include "../ceil_div.h"

namespace dflash_trt {
namespace {

constexpr std::int64_t kMaxSplits = 64;

}  // namespace

std::int64_t programsPerMultiprocessor(int tile_rows) { return tile_rows <= 16 ? 3 : tile_rows <= 64 ? 2 : 1; }

std::int64_t mostSplits(std::int64_t capacity, int tile_columns) {
  return std::clamp<std::int64_t>(ceilDiv(capacity, tile_columns), 1, kMaxSplits);
}

int chooseSplits(std::int64_t programs, std::int64_t capacity, int tile_columns, std::int64_t slots) {
  const std::int64_t blocks = ceilDiv(capacity, tile_columns);
  const std::int64_t most = mostSplits(capacity, tile_columns);
  const auto cost = [&](std::int64_t splits) {
    const std::int64_t waves = ceilDiv(programs * splits, slots);
    return 4 * waves * (ceilDiv(blocks, splits) + 3) + (splits == 1 ? 0 : 16 + splits);
  };
  std::int64_t best = 1;
  for (std::int64_t splits = 2; splits <= most; ++splits) {
    if (cost(splits) < cost(best)) {
      best = splits;
    }
  }
  return static_cast<int>(best);
}

}  // namespace dflash_trt
