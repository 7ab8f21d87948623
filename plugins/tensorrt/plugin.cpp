#include "plugin.h"

#include <algorithm>

#include "border.h"
#include "error.h"

namespace dflash_trt {
namespace {

using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

constexpr std::int32_t kDone = 0;
constexpr std::int32_t kFailed = 1;

nvinfer1::Dims knownDims(const nvinfer1::DimsExprs& expressions) {
  nvinfer1::Dims dims{};
  dims.nbDims = expressions.nbDims;
  for (int i = 0; i < dims.nbDims; ++i) {
    const nvinfer1::IDimensionExpr* expression = expressions.d[i];
    dims.d[i] = expression != nullptr && expression->isConstant() ? expression->getConstantValue() : kUnknown;
  }
  return dims;
}

bool sameShapeAndType(const PluginTensorDesc& left, const PluginTensorDesc& right) {
  return left.type == right.type && left.dims.nbDims == right.dims.nbDims &&
         std::equal(left.dims.d, left.dims.d + left.dims.nbDims, right.dims.d);
}

void bind(Sizes& sizes, const std::vector<TensorSpec>& specs, const DynamicPluginTensorDesc* tensors) {
  for (std::size_t i = 0; i < specs.size(); ++i) {
    sizes.bind(specs[i], tensors[i].desc.dims);
  }
}

void requireTypes(const Signature& signature, const std::vector<PluginTensorDesc>& tensors) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::string reason = signature.refusal(static_cast<int>(i), tensors[i], tensors[0].type);
    require(reason.empty(), reason);
  }
}

}  // namespace

nvinfer1::IPluginCapability* Plugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
  switch (type) {
    case nvinfer1::PluginCapabilityType::kCORE:
      return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD:
      return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME:
      return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

nvinfer1::IPluginV3* Plugin::clone() noexcept {
  return guarded(name_, "clone", static_cast<nvinfer1::IPluginV3*>(nullptr), [&] { return copy(); });
}

std::int32_t Plugin::getOutputDataTypes(nvinfer1::DataType* output_types, std::int32_t outputs,
                                        const nvinfer1::DataType* input_types, std::int32_t inputs) const noexcept {
  return guarded(name_, "getOutputDataTypes", kFailed, [&] {
    signature(inputs).requireCounts(inputs, outputs);
    input_count_ = inputs;
    std::fill_n(output_types, outputs, input_types[0]);  // every output of both plugins has the element type
    return kDone;
  });
}

std::int32_t Plugin::getOutputShapes(const nvinfer1::DimsExprs* inputs, std::int32_t input_count,
                                     const nvinfer1::DimsExprs*, std::int32_t shape_input_count,
                                     nvinfer1::DimsExprs* outputs, std::int32_t output_count,
                                     nvinfer1::IExprBuilder& builder) noexcept {
  return guarded(name_, "getOutputShapes", kFailed, [&] {
    const Signature& table = signature(input_count);
    table.requireCounts(input_count, output_count);
    require(shape_input_count == 0, "there are no shape inputs, not ", shape_input_count);
    input_count_ = input_count;
    Sizes sizes;
    for (int i = 0; i < input_count; ++i) {
      sizes.bind(table.inputs[i], knownDims(inputs[i]));
    }
    check(sizes);
    outputShapes(inputs, table, outputs, builder);
    return kDone;
  });
}

bool Plugin::supportsFormatCombination(std::int32_t position, const DynamicPluginTensorDesc* tensors,
                                       std::int32_t inputs, std::int32_t outputs) noexcept {
  return guarded(name_, "supportsFormatCombination", false, [&] {
    const Signature& table = signature(inputs);
    table.requireCounts(inputs, outputs);
    input_count_ = inputs;
    const std::string reason = table.refusal(position, tensors[position].desc, tensors[0].desc.type);
    if (!reason.empty()) {
      // TensorRT asks for every combination there is, so a refusal is no error.
      log(Severity::kVERBOSE, std::string("dflash_trt ") + name_ + ": " + reason);
    }
    return reason.empty();
  });
}

std::int32_t Plugin::configurePlugin(const DynamicPluginTensorDesc* inputs, std::int32_t input_count,
                                     const DynamicPluginTensorDesc* outputs, std::int32_t output_count) noexcept {
  return guarded(name_, "configurePlugin", kFailed, [&] {
    const Signature& table = signature(input_count);
    table.requireCounts(input_count, output_count);
    input_count_ = input_count;
    Sizes sizes;
    bind(sizes, table.inputs, inputs);
    bind(sizes, table.outputs, outputs);
    check(sizes);
    return kDone;
  });
}

std::size_t Plugin::getWorkspaceSize(const DynamicPluginTensorDesc* inputs, std::int32_t input_count,
                                     const DynamicPluginTensorDesc*, std::int32_t) const noexcept {
  return guarded(name_, "getWorkspaceSize", std::size_t{0},
                 [&] { return workspaceSize(inputs, signature(input_count)); });
}

std::int32_t Plugin::getAliasedInput(std::int32_t output) noexcept {
  return guarded(name_, "getAliasedInput", -1, [&] { return aliasedInput(output, knownSignature()); });
}

std::int32_t Plugin::onShapeChange(const PluginTensorDesc* inputs, std::int32_t input_count,
                                   const PluginTensorDesc* outputs, std::int32_t output_count) noexcept {
  return guarded(name_, "onShapeChange", kFailed, [&] {
    prepared_.clear();
    const Signature& table = signature(input_count);
    table.requireCounts(input_count, output_count);
    input_count_ = input_count;
    std::vector<PluginTensorDesc> tensors(inputs, inputs + input_count);
    tensors.insert(tensors.end(), outputs, outputs + output_count);
    requireTypes(table, tensors);
    Sizes sizes;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      sizes.bind(table.at(static_cast<int>(i)), tensors[i].dims);
    }
    check(sizes);
    prepare(sizes, tensors[0].type);
    prepared_ = std::move(tensors);
    return kDone;
  });
}

std::int32_t Plugin::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs,
                             const void* const* inputs, void* const* outputs, void* workspace,
                             cudaStream_t stream) noexcept {
  return guarded(name_, "enqueue", kFailed, [&] {
    require(!prepared_.empty(), "onShapeChange has not prepared these shapes");
    const Signature& table = knownSignature();
    const std::size_t input_count = table.inputs.size();
    for (std::size_t i = 0; i < prepared_.size(); ++i) {
      const PluginTensorDesc& tensor = i < input_count ? input_descs[i] : output_descs[i - input_count];
      require(sameShapeAndType(tensor, prepared_[i]), table.at(static_cast<int>(i)).name,
              " has not the shape and type of the last onShapeChange");
    }
    launch(inputs, outputs, workspace, stream, table);
    return kDone;
  });
}

nvinfer1::IPluginV3* Plugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
  return guarded(name_, "attachToContext", static_cast<nvinfer1::IPluginV3*>(nullptr), [&] { return copy(); });
}

const nvinfer1::PluginFieldCollection* Plugin::getFieldsToSerialize() noexcept {
  return guarded(name_, "getFieldsToSerialize", static_cast<nvinfer1::PluginFieldCollection*>(nullptr), [&] {
    serialized_fields_ = fields();
    serialized_ = {static_cast<std::int32_t>(serialized_fields_.size()), serialized_fields_.data()};
    return &serialized_;
  });
}

const Signature& Plugin::knownSignature() const {
  require(input_count_.has_value(), "the number of inputs is not known yet");
  return signature(*input_count_);
}

}  // namespace dflash_trt
