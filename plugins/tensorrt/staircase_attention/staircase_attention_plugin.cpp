#include "staircase_attention_plugin.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>

#include "../ceil_div.h"
#include "../element_type.h"
#include "../error.h"
#include "../head_dim.h"
#include "../launch.h"
#include "tiling.h"

namespace dflash_trt {
namespace {

using nvinfer1::DataType;
using nvinfer1::PluginFieldType;

constexpr int kInputsWithSinks = 7;
constexpr std::int64_t kMaxQueries = 128;
// More than any device has. A plan may run on a device with another number than the one that built it, and the number
// of splits, so the size of the workspace, depends on it.
constexpr int kMostMultiprocessors = 256;

Signature staircaseSignature(bool has_sinks) {
  Signature table;
  table.element_types = {DataType::kHALF, DataType::kBF16};
  table.inputs = {{"query", TypeRule::kElement, "B Hq Q D"},
                  {"key_cache", TypeRule::kElement, "B Hkv C D"},
                  {"value_cache", TypeRule::kElement, "B Hkv C D"},
                  {"context_len", TypeRule::kInt64, "B"},
                  {"visibility", TypeRule::kBool, "B Q Q"}};
  if (has_sinks) {
    table.inputs.push_back({"sinks", TypeRule::kElement, "Hq"});
  }
  table.inputs.push_back({"position_ids", TypeRule::kInt64, "B Q"});
  table.outputs = {{"output", TypeRule::kElement, "B Q Hq*D"}};
  return table;
}

// The most workspace that any batch, number of queries and device within these limits takes.
std::size_t workspaceBound(const KernelKey& key, int architecture, std::int64_t max_batch, std::int64_t max_queries,
                           int kv_heads, std::int64_t group, std::int64_t min_capacity, std::int64_t max_capacity) {
  // Equal tile and number of tiles give equal splits; the most rows then take the most memory.
  std::map<std::pair<const KernelVariant*, std::int64_t>, std::int64_t> most_rows;
  for (std::int64_t queries = 1; queries <= max_queries; ++queries) {
    const std::int64_t rows = group * queries;
    const KernelVariant& variant = chooseVariant(key, architecture, rows);
    most_rows[{&variant, ceilDiv(rows, variant.tile_rows)}] = rows;
  }
  std::size_t most = 0;
  for (const auto& [tiles, rows] : most_rows) {
    const auto& [variant, row_tiles] = tiles;
    for (std::int64_t batch = 1; batch <= max_batch; ++batch) {
      const auto bytes = [&, rows = rows](std::int64_t splits) {
        return splits == 1 ? 0 : Partials{batch * kv_heads * splits * rows, key.head_dim}.bytes();
      };
      const std::int64_t programs = batch * kv_heads * row_tiles;
      if (min_capacity != max_capacity) {
        // Which splits every capacity in a range takes is too much to ask; the finest split is a bound.
        most = std::max(most, bytes(mostSplits(max_capacity, variant->tile_columns)));
        continue;
      }
      for (int processors = 1; processors <= kMostMultiprocessors; ++processors) {
        const std::int64_t slots = processors * programsPerMultiprocessor(variant->tile_rows);
        most = std::max(most, bytes(chooseSplits(programs, max_capacity, variant->tile_columns, slots)));
      }
    }
  }
  return most;
}

}  // namespace

std::vector<nvinfer1::PluginField> StaircaseAttentionPlugin::fieldNames() {
  return {{"scale", nullptr, PluginFieldType::kFLOAT32, 1},
          {"sliding_window", nullptr, PluginFieldType::kINT32, 1},
          {"causal", nullptr, PluginFieldType::kINT32, 1},
          {"softcap", nullptr, PluginFieldType::kFLOAT32, 1}};
}

StaircaseAttentionPlugin::Attributes StaircaseAttentionPlugin::read(const FieldReader& fields) {
  const Attributes a{fields.float32("scale"), fields.int32("sliding_window"), fields.int32("causal"),
                     fields.float32("softcap")};
  require(std::isfinite(a.scale) && a.scale > 0, "scale is ", a.scale, "; it must be greater than 0");
  require(a.sliding_window >= 0, "sliding_window is ", a.sliding_window, "; it must be 0 (none) or greater");
  require(a.causal == 0 || a.causal == 1, "causal is ", a.causal, "; it must be 0 or 1");
  require(std::isfinite(a.softcap) && a.softcap >= 0, "softcap is ", a.softcap, "; it must be 0 (none) or greater");
  return a;
}

std::string StaircaseAttentionPlugin::describe(const Attributes& a) {
  std::ostringstream text;
  text << "scale=" << a.scale << " sliding_window=" << a.sliding_window << " causal=" << a.causal
       << " softcap=" << a.softcap;
  return text.str();
}

StaircaseAttentionPlugin::StaircaseAttentionPlugin(const FieldReader& fields)
    : StaircaseAttentionPlugin(read(fields)) {}

StaircaseAttentionPlugin::StaircaseAttentionPlugin(const Attributes& attributes)
    : Plugin(kName, 1, describe(attributes)), attributes_(attributes) {}

std::vector<nvinfer1::PluginField> StaircaseAttentionPlugin::fields() const {
  return {{"scale", &attributes_.scale, PluginFieldType::kFLOAT32, 1},
          {"sliding_window", &attributes_.sliding_window, PluginFieldType::kINT32, 1},
          {"causal", &attributes_.causal, PluginFieldType::kINT32, 1},
          {"softcap", &attributes_.softcap, PluginFieldType::kFLOAT32, 1}};
}

const Signature& StaircaseAttentionPlugin::signature(int input_count) const {
  static const Signature with_sinks = staircaseSignature(true);
  static const Signature without_sinks = staircaseSignature(false);
  require(input_count == kInputsWithSinks || input_count == kInputsWithSinks - 1, "expected ", kInputsWithSinks,
          " inputs, or ", kInputsWithSinks - 1, " without sinks, not ", input_count);
  return input_count == kInputsWithSinks ? with_sinks : without_sinks;
}

void StaircaseAttentionPlugin::check(const Sizes& sizes) const {
  const std::int64_t queries = sizes["Q"];
  const std::int64_t heads = sizes["Hq"];
  const std::int64_t kv_heads = sizes["Hkv"];
  requireHeadDim(sizes["D"]);
  require(queries <= kMaxQueries, "query has ", queries, " queries; at most ", kMaxQueries, " are possible");
  const std::int64_t capacity = sizes["C"];
  require(queries == kUnknown || capacity == kUnknown || queries <= capacity, "query has ", queries,
          " queries, but key_cache only ", capacity, " slots");
  require(kv_heads == kUnknown || kv_heads > 0, "key_cache has no heads");
  require(heads == kUnknown || kv_heads == kUnknown || heads % kv_heads == 0, "query has ", heads,
          " heads, which is not a multiple of the ", kv_heads, " heads of key_cache");
  if (sizes.has("Hq*D") && sizes["Hq*D"] != kUnknown && heads != kUnknown && sizes["D"] != kUnknown) {
    require(sizes["Hq*D"] == heads * sizes["D"], "output: dimension 2 is ", sizes["Hq*D"], ", but heads * head_dim is ",
            heads * sizes["D"]);
  }
}

void StaircaseAttentionPlugin::outputShapes(const nvinfer1::DimsExprs* inputs, const Signature&,
                                            nvinfer1::DimsExprs* outputs, nvinfer1::IExprBuilder& builder) const {
  const auto& query = inputs[0].d;
  outputs[0].nbDims = 3;
  outputs[0].d[0] = query[0];
  outputs[0].d[1] = query[2];
  outputs[0].d[2] = builder.operation(nvinfer1::DimensionOperation::kPROD, *query[1], *query[3]);
}

KernelKey StaircaseAttentionPlugin::contextKey(DataType element, int head_dim) const {
  const char* features = attributes_.softcap > 0 ? "softcap" : attributes_.sliding_window > 0 ? "window" : "";
  return {"staircase_context", kernelDtype(element), head_dim, features};
}

std::size_t StaircaseAttentionPlugin::workspaceSize(const nvinfer1::DynamicPluginTensorDesc* inputs,
                                                    const Signature& signature) const {
  const auto& query = inputs[0];
  const auto& cache = inputs[signature.input("key_cache")];
  require(query.max.nbDims == 4 && cache.max.nbDims == 4 && cache.min.nbDims == 4,
          "the optimisation profile gives no range for query and key_cache");
  const std::int64_t kv_heads = cache.max.d[1];
  require(kv_heads > 0, "key_cache has no heads");
  // A builder that only estimates a range may estimate more queries than there can be.
  return workspaceBound(contextKey(query.desc.type, static_cast<int>(query.max.d[3])), currentDevice().architecture(),
                        query.max.d[0], std::min(query.max.d[2], kMaxQueries), static_cast<int>(kv_heads),
                        query.max.d[1] / kv_heads, cache.min.d[2], cache.max.d[2]);
}

void StaircaseAttentionPlugin::prepare(const Sizes& sizes, DataType element) {
  const Device device = currentDevice();
  const int architecture = device.architecture();
  Prepared p;
  p.batch = static_cast<int>(sizes["B"]);
  p.queries = static_cast<int>(sizes["Q"]);
  p.capacity = static_cast<int>(sizes["C"]);
  p.kv_heads = static_cast<int>(sizes["Hkv"]);
  p.group = static_cast<int>(sizes["Hq"]) / p.kv_heads;
  p.head_dim = static_cast<int>(sizes["D"]);

  const std::int64_t rows = static_cast<std::int64_t>(p.group) * p.queries;
  const KernelVariant& context = chooseVariant(contextKey(element, p.head_dim), architecture, rows);
  const std::int64_t programs = p.batch * p.kv_heads * ceilDiv(rows, context.tile_rows);
  const std::int64_t slots = device.multiprocessors * programsPerMultiprocessor(context.tile_rows);
  p.splits = chooseSplits(programs, p.capacity, context.tile_columns, slots);
  p.context = loadKernel(context, device);
  if (p.splits > 1) {
    const KernelKey merge{"staircase_merge", kernelDtype(element), p.head_dim, ""};
    p.merge = loadKernel(chooseVariant(merge, architecture, rows), device);
  }
  prepared_ = p;
}

void StaircaseAttentionPlugin::launch(const void* const* inputs, void* const* outputs, void* workspace,
                                      cudaStream_t stream, const Signature& signature) const {
  const auto input = [&](const char* name) { return inputs[signature.input(name)]; };
  const Prepared& p = prepared_;
  StaircaseArguments arguments{};
  arguments.query = input("query");
  arguments.key_cache = input("key_cache");
  arguments.value_cache = input("value_cache");
  arguments.context_len = input("context_len");
  arguments.visibility = input("visibility");
  arguments.sinks = signature.input("sinks") < 0 ? nullptr : input("sinks");
  arguments.position_ids = input("position_ids");
  arguments.output = outputs[0];
  arguments.queries = p.queries;
  arguments.capacity = p.capacity;
  arguments.kv_heads = p.kv_heads;
  arguments.group = p.group;
  arguments.splits = p.splits;
  arguments.sliding_window = attributes_.sliding_window;
  arguments.causal = attributes_.causal;
  arguments.scale = attributes_.scale;
  arguments.softcap = attributes_.softcap;
  if (p.splits == 1) {
    launchStaircaseContext(p.context, arguments, p.batch, stream);
    return;
  }
  require(workspace != nullptr, "there is no workspace for ", p.splits, " splits");
  const std::int64_t rows = static_cast<std::int64_t>(p.batch) * p.kv_heads * p.splits * p.group * p.queries;
  const Partials partials{rows, p.head_dim};
  arguments.partial = workspace;
  arguments.lse = static_cast<char*>(workspace) + partials.lseOffset();
  launchStaircaseContext(p.context, arguments, p.batch, stream);
  launchStaircaseMerge(p.merge, arguments, p.batch, stream);
}

}  // namespace dflash_trt
