#include "launch.h"

#include <cstdint>

#include "ceil_div.h"
#include "error.h"

namespace dflash_trt {
namespace {

constexpr int kThreadsPerWarp = 32;
constexpr std::uintptr_t kAlignment = 16;  // the kernels are compiled for pointers aligned to this
constexpr std::int64_t kLargestGridX = 2147483647;
constexpr std::int64_t kLargestGridYZ = 65535;
constexpr std::int64_t kMoveWordsPerProgram = 64;
constexpr std::int64_t kGatherWordsPerProgram = 1024;

enum class MayBeNull { kNo, kYes };

// Named, so that a bad address can be told of.
struct Pointer {
  const char* name;
  const void* address;
  MayBeNull may_be_null = MayBeNull::kNo;
};

void* slot(const Pointer& pointer) {
  require(pointer.address != nullptr || pointer.may_be_null == MayBeNull::kYes, pointer.name, " is null");
  require(reinterpret_cast<std::uintptr_t>(pointer.address) % kAlignment == 0, pointer.name, " is at ",
          pointer.address, ", which is not a multiple of ", kAlignment);
  return const_cast<const void**>(&pointer.address);
}
void* slot(const int& value) { return const_cast<int*>(&value); }
void* slot(const float& value) { return const_cast<float*>(&value); }

struct Grid {
  std::int64_t x;
  std::int64_t y;
  std::int64_t z;
};

template <typename... Arguments>
void launch(const Kernel& kernel, const Grid& grid, cudaStream_t stream, const Arguments&... arguments) {
  const KernelVariant& variant = *kernel.variant;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) {
    return;
  }
  require(grid.x <= kLargestGridX && grid.y <= kLargestGridYZ && grid.z <= kLargestGridYZ, variant.kernel,
          ": a grid of ", grid.x, " x ", grid.y, " x ", grid.z, " is more than CUDA takes (", kLargestGridX, " x ",
          kLargestGridYZ, " x ", kLargestGridYZ, ")");
  // Triton adds two pointers to every kernel, for scratch memory and the profiler's. None of these kernels has any.
  void* global_scratch = nullptr;
  void* profile_scratch = nullptr;
  void* slots[] = {slot(arguments)..., &global_scratch, &profile_scratch};
  const dim3 blocks(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z));
  const dim3 threads(static_cast<unsigned>(kThreadsPerWarp * variant.num_warps));
  requireCuda(cudaLaunchKernel(kernel.handle, blocks, threads, slots, static_cast<std::size_t>(variant.shared_bytes),
                               stream),
              "launching ", variant.symbol, " (grid ", grid.x, " x ", grid.y, " x ", grid.z, ", ", threads.x,
              " threads, ", variant.shared_bytes, " bytes of shared memory)");
}

// A variant whose tile does not matter (0) takes one row a program.
std::int64_t tiles(const Kernel& kernel, std::int64_t rows) {
  const int tile_rows = kernel.variant->tile_rows;
  return tile_rows > 0 ? ceilDiv(rows, tile_rows) : rows;
}

std::int64_t rowsOf(const StaircaseArguments& a) { return static_cast<std::int64_t>(a.group) * a.queries; }

}  // namespace

void launchKvInjection(const Kernel& kernel, const KvInjectionArguments& a, int batch, cudaStream_t stream) {
  const int has_norm = a.norm_weight != nullptr;
  const int has_count = a.row_count != nullptr;
  launch(kernel, {tiles(kernel, a.rows), a.kv_heads, batch}, stream,
         Pointer{"key", a.key},
         Pointer{"value", a.value},
         Pointer{"key_norm_weight", a.norm_weight, MayBeNull::kYes},
         Pointer{"position_ids", a.position_ids},
         Pointer{"cos", a.cos},
         Pointer{"sin", a.sin},
         Pointer{"write_start", a.write_start},
         Pointer{"row_count", a.row_count, MayBeNull::kYes},
         Pointer{"key_cache", a.key_cache},
         Pointer{"value_cache", a.value_cache},
         a.rows, a.capacity, a.kv_heads, a.max_positions, a.rotary_half, has_norm, has_count, a.eps);
}

void launchStaircaseContext(const Kernel& kernel, const StaircaseArguments& a, int batch, cudaStream_t stream) {
  const int has_sinks = a.sinks != nullptr;
  const MayBeNull unsplit = a.splits == 1 ? MayBeNull::kYes : MayBeNull::kNo;
  launch(kernel, {tiles(kernel, rowsOf(a)) * a.splits, a.kv_heads, batch}, stream,
         Pointer{"query", a.query},
         Pointer{"key_cache", a.key_cache},
         Pointer{"value_cache", a.value_cache},
         Pointer{"context_len", a.context_len},
         Pointer{"visibility", a.visibility},
         Pointer{"sinks", a.sinks, MayBeNull::kYes},
         Pointer{"position_ids", a.position_ids},
         Pointer{"output", a.output},
         Pointer{"workspace", a.partial, unsplit},
         Pointer{"workspace", a.lse, unsplit},
         a.queries, a.capacity, a.kv_heads, a.group, a.splits, a.sliding_window, a.causal, has_sinks, a.scale,
         a.softcap);
}

void launchStaircaseMerge(const Kernel& kernel, const StaircaseArguments& a, int batch, cudaStream_t stream) {
  const int has_sinks = a.sinks != nullptr;
  launch(kernel, {tiles(kernel, rowsOf(a)), a.kv_heads, batch}, stream,
         Pointer{"workspace", a.partial},
         Pointer{"workspace", a.lse},
         Pointer{"sinks", a.sinks, MayBeNull::kYes},
         Pointer{"output", a.output},
         a.queries, a.kv_heads, a.group, a.splits, has_sinks);
}

void launchAcceptPath(const Kernel& kernel, const AcceptPathArguments& a, int batch, cudaStream_t stream) {
  launch(kernel, {batch, 1, 1}, stream,
         Pointer{"tokens", a.tokens},
         Pointer{"choices", a.choices},
         Pointer{"visibility", a.visibility},
         Pointer{"parents", a.parents},
         Pointer{"path", a.path},
         Pointer{"path_len", a.path_len},
         Pointer{"bonus", a.bonus},
         a.nodes, a.path_capacity);
}

void launchMoveRows(const Kernel& kernel, const MoveRowsArguments& a, int buffers, int batch, cudaStream_t stream) {
  const std::int64_t heads = static_cast<std::int64_t>(buffers) * a.kv_heads;
  launch(kernel, {heads, ceilDiv(a.words, kMoveWordsPerProgram), batch}, stream,
         Pointer{"buffers", a.buffers},
         Pointer{"path", a.path},
         Pointer{"path_len", a.path_len},
         Pointer{"context_len", a.context_len},
         a.capacity, a.kv_heads, a.words, a.path_stride);
}

void launchGatherFeatures(const Kernel& kernel, const GatherFeaturesArguments& a, int batch, cudaStream_t stream) {
  launch(kernel, {a.out_rows, ceilDiv(a.words, kGatherWordsPerProgram), batch}, stream,
         Pointer{"features", a.features},
         Pointer{"path", a.path},
         Pointer{"path_len", a.path_len},
         Pointer{"output", a.output},
         a.nodes, a.words, a.path_stride, a.out_rows);
}

}  // namespace dflash_trt
