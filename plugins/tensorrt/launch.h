// The kernels' argument lists, one struct each, and their launches.
//
// A launch allocates nothing, loads nothing and does not synchronise: it may be captured. Nothing to do (no rows) is
// no launch.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels.h"

namespace dflash_trt {

struct KvInjectionArguments {
  const void* key;
  const void* value;
  const void* norm_weight;  // null without one
  const void* position_ids;
  const void* cos;
  const void* sin;
  const void* write_start;
  const void* row_count;  // null: all rows
  void* key_cache;
  void* value_cache;
  int rows;
  int capacity;
  int kv_heads;
  int max_positions;
  int rotary_half;
  float eps;
};
void launchKvInjection(const Kernel& kernel, const KvInjectionArguments& arguments, int batch, cudaStream_t stream);

struct StaircaseArguments {
  const void* query;
  const void* key_cache;
  const void* value_cache;
  const void* context_len;
  const void* visibility;
  const void* sinks;  // null without any
  const void* position_ids;
  void* output;
  void* partial;  // null with one split
  void* lse;      // null with one split
  int queries;
  int capacity;
  int kv_heads;
  int group;  // query heads per KV head
  int splits;
  int sliding_window;
  int causal;
  float scale;
  float softcap;
};
void launchStaircaseContext(const Kernel& kernel, const StaircaseArguments& arguments, int batch, cudaStream_t stream);
void launchStaircaseMerge(const Kernel& kernel, const StaircaseArguments& arguments, int batch, cudaStream_t stream);

struct AcceptPathArguments {
  const void* tokens;
  const void* choices;
  const void* visibility;
  const void* parents;
  void* path;
  void* path_len;
  void* bonus;
  int nodes;
  int path_capacity;
};
void launchAcceptPath(const Kernel& kernel, const AcceptPathArguments& arguments, int batch, cudaStream_t stream);

struct MoveRowsArguments {
  const void* buffers;  // device array of addresses
  const void* path;
  const void* path_len;
  const void* context_len;
  int capacity;
  int kv_heads;
  int words;  // 32-bit words of a row
  int path_stride;
};
void launchMoveRows(const Kernel& kernel, const MoveRowsArguments& arguments, int buffers, int batch,
                    cudaStream_t stream);

struct GatherFeaturesArguments {
  const void* features;
  const void* path;
  const void* path_len;
  void* output;
  int nodes;
  int words;  // 32-bit words of a row
  int path_stride;
  int out_rows;
};
void launchGatherFeatures(const Kernel& kernel, const GatherFeaturesArguments& arguments, int batch,
                          cudaStream_t stream);

}  // namespace dflash_trt
