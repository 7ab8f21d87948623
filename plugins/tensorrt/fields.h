// Reading a plugin's attributes from the fields TensorRT hands over: strictly, since a default nobody asked for would
// change what a graph computes.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <vector>

namespace dflash_trt {

class FieldReader {
 public:
  // Throws on a field that is not among `names`, or there twice. `plugin_version` and `plugin_namespace`, which ONNX
  // nodes carry beside the operator's attributes, are passed over.
  FieldReader(const nvinfer1::PluginFieldCollection* fields, const std::vector<nvinfer1::PluginField>& known);

  // Throw if the field is missing, of another type or not a single value.
  float float32(const char* name) const;
  std::int32_t int32(const char* name) const;  // also from an int64 field, where the value fits

 private:
  const nvinfer1::PluginField& scalar(const char* name) const;

  std::vector<nvinfer1::PluginField> fields_;
};

}  // namespace dflash_trt
