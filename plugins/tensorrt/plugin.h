// What both plugins share: the three capabilities of an IPluginV3 with the noexcept border around them. A plugin itself
// implements the protected methods, which throw on a broken rule.
#pragma once

#include <NvInferRuntime.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "signature.h"

namespace dflash_trt {

constexpr const char* kPluginVersion = "1";
constexpr const char* kPluginNamespace = "dflash_trt";

class Plugin : public nvinfer1::IPluginV3,
               public nvinfer1::IPluginV3OneCore,
               public nvinfer1::IPluginV3OneBuildV2,
               public nvinfer1::IPluginV3OneRuntime {
 public:
  // IPluginV3
  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept final;
  nvinfer1::IPluginV3* clone() noexcept final;

  // IPluginV3OneCore
  const char* getPluginName() const noexcept final { return name_; }
  const char* getPluginVersion() const noexcept final { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept final { return kPluginNamespace; }

  // IPluginV3OneBuildV2
  std::int32_t getNbOutputs() const noexcept final { return outputs_; }
  std::int32_t getOutputDataTypes(nvinfer1::DataType* output_types, std::int32_t outputs,
                                  const nvinfer1::DataType* input_types, std::int32_t inputs) const noexcept final;
  std::int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, std::int32_t input_count,
                               const nvinfer1::DimsExprs* shape_inputs, std::int32_t shape_input_count,
                               nvinfer1::DimsExprs* outputs, std::int32_t output_count,
                               nvinfer1::IExprBuilder& builder) noexcept final;
  bool supportsFormatCombination(std::int32_t position, const nvinfer1::DynamicPluginTensorDesc* tensors,
                                 std::int32_t inputs, std::int32_t outputs) noexcept final;
  std::int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, std::int32_t input_count,
                               const nvinfer1::DynamicPluginTensorDesc* outputs,
                               std::int32_t output_count) noexcept final;
  std::size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* inputs, std::int32_t input_count,
                               const nvinfer1::DynamicPluginTensorDesc* outputs,
                               std::int32_t output_count) const noexcept final;
  std::int32_t getAliasedInput(std::int32_t output) noexcept final;
  const char* getTimingCacheID() noexcept final { return description_.c_str(); }
  const char* getMetadataString() noexcept final { return description_.c_str(); }

  // IPluginV3OneRuntime
  std::int32_t onShapeChange(const nvinfer1::PluginTensorDesc* inputs, std::int32_t input_count,
                             const nvinfer1::PluginTensorDesc* outputs, std::int32_t output_count) noexcept final;
  std::int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs, const nvinfer1::PluginTensorDesc* output_descs,
                       const void* const* inputs, void* const* outputs, void* workspace,
                       cudaStream_t stream) noexcept final;
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept final;
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept final;

 protected:
  // `description` tells the attributes and their values.
  Plugin(const char* name, std::int32_t outputs, std::string description)
      : name_(name), outputs_(outputs), description_(std::move(description)) {}

  virtual Plugin* copy() const = 0;
  virtual std::vector<nvinfer1::PluginField> fields() const = 0;  // pointing into this object

  // The table for a number of inputs, which tells whether the optional one is there. Throws if it cannot be.
  virtual const Signature& signature(int input_count) const = 0;
  // Rules beyond ranks and equal sizes. Sizes may be kUnknown.
  virtual void check(const Sizes& sizes) const = 0;
  virtual void outputShapes(const nvinfer1::DimsExprs* inputs, const Signature& signature,
                            nvinfer1::DimsExprs* outputs, nvinfer1::IExprBuilder& builder) const = 0;
  virtual int aliasedInput(int output, const Signature& signature) const = 0;  // -1: none
  virtual std::size_t workspaceSize(const nvinfer1::DynamicPluginTensorDesc* inputs,
                                    const Signature& signature) const = 0;

  // All that takes time or memory at run time: choosing and loading the kernels. `launch` only launches.
  virtual void prepare(const Sizes& sizes, nvinfer1::DataType element) = 0;
  virtual void launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
                      const Signature& signature) const = 0;

 private:
  const Signature& knownSignature() const;  // throws before any call told the number of inputs

  const char* name_;
  std::int32_t outputs_;
  std::string description_;
  // Known from the first call that tells it: getAliasedInput and enqueue are not told.
  mutable std::optional<int> input_count_;
  std::vector<nvinfer1::PluginTensorDesc> prepared_;  // inputs, then outputs, as of the last onShapeChange
  std::vector<nvinfer1::PluginField> serialized_fields_;
  nvinfer1::PluginFieldCollection serialized_{};
};

}  // namespace dflash_trt
