// How StaircaseAttention is cut into programs and its context into splits: the rules of `kernels/tiling.py`, in
// integers so that both give the same.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dflash_trt {

// Programs that share a multiprocessor.
std::int64_t programsPerMultiprocessor(int tile_rows);

// Into how many parts to split the context. programs = batch * KV heads * row tiles; slots = programs the device runs
// at once. A cache without slots is one part.
int chooseSplits(std::int64_t programs, std::int64_t capacity, int tile_columns, std::int64_t slots);

// The most parts that any number of programs and slots gives.
std::int64_t mostSplits(std::int64_t capacity, int tile_columns);

// What splits leave for the merge: a partial result per split and row, then its log-sum-exp.
struct Partials {
  std::int64_t rows;  // batch * KV heads * splits * (head, query) rows
  int head_dim;

  std::size_t lseOffset() const { return sizeof(float) * rows * head_dim; }
  std::size_t bytes() const { return lseOffset() + sizeof(float) * rows; }
};

}  // namespace dflash_trt
