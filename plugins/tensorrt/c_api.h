// What the runtime calls between two engines, with raw device pointers and a stream: 0 is fine, anything else an error
// that dflash_trt_last_error() tells about, on the same thread. All tensors are contiguous.
//
// The first call of a process loads kernels and must not fall into a stream capture.
#pragma once

#define DFLASH_TRT_API extern "C" __attribute__((visibility("default")))

// The acceptance walk. tokens, choices, parents: int64 [batch, nodes]; visibility: bool [batch, nodes, nodes],
// ancestors and self. Writes path int64 [batch, path_capacity], path_len and bonus int64 [batch].
DFLASH_TRT_API int dflash_trt_accept_path(const void* tokens, const void* choices, const void* visibility,
                                          const void* parents, void* path, void* path_len, void* bonus, int batch,
                                          int nodes, int path_capacity, void* stream);

// Moves slot context_len + path[i] to context_len + i in each cache [batch, kv_heads, capacity, row]. buffers: device
// array of the caches' addresses; path: int64 [batch, path_stride]; path_len, context_len: int64 [batch].
DFLASH_TRT_API int dflash_trt_move_rows(const void* buffers, int n_buffers, const void* path, const void* path_len,
                                        const void* context_len, int batch, int kv_heads, int capacity, int row_bytes,
                                        int path_stride, void* stream);

// Row i of output [batch, out_rows, row] becomes row path[i] of features [batch, nodes, row], zeros from path_len on.
DFLASH_TRT_API int dflash_trt_gather_features(const void* features, const void* path, const void* path_len,
                                              void* output, int batch, int nodes, int row_bytes, int path_stride,
                                              int out_rows, void* stream);

DFLASH_TRT_API const char* dflash_trt_last_error(void);
DFLASH_TRT_API const char* dflash_trt_version(void);
