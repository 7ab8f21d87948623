// The creator of a plugin class: a name, its fields, and a constructor from them.
#pragma once

#include <NvInferRuntime.h>

#include <vector>

#include "border.h"
#include "fields.h"
#include "plugin.h"

namespace dflash_trt {

// PluginClass has kName, a static fieldNames() (name and type of every attribute) and a constructor from a FieldReader.
// Building from an ONNX node and loading from an engine are the same: the serialised fields are the attributes.
template <typename PluginClass>
class Creator : public nvinfer1::IPluginCreatorV3One {
 public:
  Creator() : names_(PluginClass::fieldNames()), collection_{static_cast<std::int32_t>(names_.size()), names_.data()} {}

  nvinfer1::IPluginV3* createPlugin(const char*, const nvinfer1::PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase) noexcept override {
    return guarded(PluginClass::kName, "createPlugin", static_cast<nvinfer1::IPluginV3*>(nullptr),
                   [&] { return new PluginClass(FieldReader(fields, names_)); });
  }
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  const char* getPluginName() const noexcept override { return PluginClass::kName; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

 private:
  std::vector<nvinfer1::PluginField> names_;
  nvinfer1::PluginFieldCollection collection_;
};

}  // namespace dflash_trt
