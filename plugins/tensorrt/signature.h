// What a plugin's tensors must be, as a table: name, type and dimensions by name. All checks of ranks, sizes, types and
// formats read these tables.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace dflash_trt {

constexpr std::int64_t kUnknown = -1;  // a dimension known at run time only

enum class TypeRule {
  kElement,  // the type of the first input
  kFloat32,
  kInt64,
  kBool,
};

struct TensorSpec {
  const char* name;
  TypeRule type;
  const char* dims;  // names separated by blanks; equal names mean equal sizes
};

// Sizes by the names that the table gives them.
class Sizes {
 public:
  bool has(const char* name) const { return sizes_.count(name) > 0; }
  std::int64_t operator[](const char* name) const { return sizes_.at(name).value; }

  // Throws where the tensor has another rank, or a size other than an earlier tensor gave the same name.
  void bind(const TensorSpec& spec, const nvinfer1::Dims& dims);

 private:
  struct Size {
    std::int64_t value;
    std::string from;
  };
  std::map<std::string, Size> sizes_;
};

struct Signature {
  std::vector<nvinfer1::DataType> element_types;  // those the first input may have
  std::vector<TensorSpec> inputs;
  std::vector<TensorSpec> outputs;

  int input(const char* name) const;  // its position, or -1
  const TensorSpec& at(int position) const;  // inputs, then outputs

  // Why the tensor may not have this type and format, given the first input's type; empty if it may.
  std::string refusal(int position, const nvinfer1::PluginTensorDesc& tensor, nvinfer1::DataType element) const;

  // Throws if the number of tensors is not the table's.
  void requireCounts(int inputs_given, int outputs_given) const;
};

const char* typeName(nvinfer1::DataType type);

}  // namespace dflash_trt
