#include "kv_injection_plugin.h"

#include <cmath>
#include <sstream>

#include "../element_type.h"
#include "../error.h"
#include "../head_dim.h"
#include "../launch.h"

namespace dflash_trt {
namespace {

using nvinfer1::DataType;

constexpr int kInputsWithNorm = 9;

Signature kvInjectionSignature(bool has_norm) {
  Signature table;
  table.element_types = {DataType::kHALF, DataType::kBF16, DataType::kFLOAT};
  table.inputs = {{"key", TypeRule::kElement, "B N Hkv D"}, {"value", TypeRule::kElement, "B N Hkv D"}};
  if (has_norm) {
    table.inputs.push_back({"key_norm_weight", TypeRule::kElement, "D"});
  }
  table.inputs.insert(table.inputs.end(), {
                                              {"position_ids", TypeRule::kInt64, "B N"},
                                              {"cos", TypeRule::kFloat32, "P R"},
                                              {"sin", TypeRule::kFloat32, "P R"},
                                              {"write_start", TypeRule::kInt64, "B"},
                                              {"key_cache", TypeRule::kElement, "B Hkv C D"},
                                              {"value_cache", TypeRule::kElement, "B Hkv C D"},
                                          });
  table.outputs = {{"output key_cache", TypeRule::kElement, "B Hkv C D"},
                   {"output value_cache", TypeRule::kElement, "B Hkv C D"}};
  return table;
}

std::string describe(float eps) {
  std::ostringstream text;
  text << "eps=" << eps;
  return text.str();
}

}  // namespace

std::vector<nvinfer1::PluginField> KvInjectionPlugin::fieldNames() {
  return {{"eps", nullptr, nvinfer1::PluginFieldType::kFLOAT32, 1}};
}

KvInjectionPlugin::KvInjectionPlugin(const FieldReader& fields)
    : Plugin(kName, 2, describe(fields.float32("eps"))), eps_(fields.float32("eps")) {
  require(std::isfinite(eps_) && eps_ > 0, "eps is ", eps_, "; it must be greater than 0");
}

std::vector<nvinfer1::PluginField> KvInjectionPlugin::fields() const {
  return {{"eps", &eps_, nvinfer1::PluginFieldType::kFLOAT32, 1}};
}

const Signature& KvInjectionPlugin::signature(int input_count) const {
  static const Signature with_norm = kvInjectionSignature(true);
  static const Signature without_norm = kvInjectionSignature(false);
  require(input_count == kInputsWithNorm || input_count == kInputsWithNorm - 1, "expected ", kInputsWithNorm,
          " inputs, or ", kInputsWithNorm - 1, " without key_norm_weight, not ", input_count);
  return input_count == kInputsWithNorm ? with_norm : without_norm;
}

void KvInjectionPlugin::check(const Sizes& sizes) const {
  const std::int64_t head_dim = sizes["D"];
  const std::int64_t rotary_half = sizes["R"];
  requireHeadDim(head_dim);
  require(rotary_half == kUnknown || rotary_half > 0, "cos has ", rotary_half, " columns; it must have some");
  require(rotary_half == kUnknown || head_dim == kUnknown || 2 * rotary_half <= head_dim, "cos has ", rotary_half,
          " columns; twice that must not exceed head_dim, which is ", head_dim);
}

void KvInjectionPlugin::outputShapes(const nvinfer1::DimsExprs* inputs, const Signature& signature,
                                     nvinfer1::DimsExprs* outputs, nvinfer1::IExprBuilder&) const {
  outputs[0] = inputs[signature.input("key_cache")];
  outputs[1] = inputs[signature.input("value_cache")];
}

int KvInjectionPlugin::aliasedInput(int output, const Signature& signature) const {
  require(output == 0 || output == 1, "there is no output ", output);
  return signature.input(output == 0 ? "key_cache" : "value_cache");
}

void KvInjectionPlugin::prepare(const Sizes& sizes, DataType element) {
  const Device device = currentDevice();
  const int head_dim = static_cast<int>(sizes["D"]);
  const int rotary_half = static_cast<int>(sizes["R"]);
  const char* features = 2 * rotary_half == head_dim ? "" : "partial";
  const KernelVariant& variant = chooseVariant({"kv_injection", kernelDtype(element), head_dim, features},
                                               device.architecture(), sizes["N"]);
  prepared_ = {loadKernel(variant, device),
               static_cast<int>(sizes["B"]),
               static_cast<int>(sizes["N"]),
               static_cast<int>(sizes["C"]),
               static_cast<int>(sizes["Hkv"]),
               static_cast<int>(sizes["P"]),
               rotary_half};
}

void KvInjectionPlugin::launch(const void* const* inputs, void* const* outputs, void*, cudaStream_t stream,
                               const Signature& signature) const {
  const auto input = [&](const char* name) { return inputs[signature.input(name)]; };
  // The kernel writes rows, not whole caches: what it does not write must be there already.
  for (int output = 0; output < 2; ++output) {
    const int source = aliasedInput(output, signature);
    require(inputs[source] == outputs[output], "output ", output, " is not the same buffer as input ",
            signature.inputs[source].name, "; the cache must be updated in place: build the engine with ",
            "PreviewFeature ALIASED_PLUGIN_IO_10_03 and bind one buffer as past and present");
  }
  KvInjectionArguments arguments{};
  arguments.key = input("key");
  arguments.value = input("value");
  arguments.norm_weight = signature.input("key_norm_weight") < 0 ? nullptr : input("key_norm_weight");
  arguments.position_ids = input("position_ids");
  arguments.cos = input("cos");
  arguments.sin = input("sin");
  arguments.write_start = input("write_start");
  arguments.row_count = nullptr;
  arguments.key_cache = outputs[0];
  arguments.value_cache = outputs[1];
  arguments.rows = prepared_.rows;
  arguments.capacity = prepared_.capacity;
  arguments.kv_heads = prepared_.kv_heads;
  arguments.max_positions = prepared_.max_positions;
  arguments.rotary_half = prepared_.rotary_half;
  arguments.eps = eps_;
  launchKvInjection(prepared_.kernel, arguments, prepared_.batch, stream);
}

}  // namespace dflash_trt
