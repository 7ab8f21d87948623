#include "signature.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <sstream>

#include "error.h"

namespace dflash_trt {

using nvinfer1::DataType;

void Sizes::bind(const TensorSpec& spec, const nvinfer1::Dims& dims) {
  std::istringstream words(spec.dims);
  std::vector<std::string> names;
  for (std::string name; words >> name;) {
    names.push_back(name);
  }
  require(dims.nbDims == static_cast<int>(names.size()), spec.name, " has ", dims.nbDims, " dimensions; it must be [",
          spec.dims, "]");
  for (int i = 0; i < dims.nbDims; ++i) {
    const std::int64_t value = dims.d[i];
    require(value <= std::numeric_limits<std::int32_t>::max(), spec.name, ": dimension ", i, " (", names[i], ") is ",
            value, ", more than 32 bits hold");
    const auto [known, is_new] = sizes_.emplace(names[i], Size{value, spec.name});
    if (is_new || value == kUnknown) {
      continue;
    }
    if (known->second.value == kUnknown) {
      known->second = {value, spec.name};
    }
    require(known->second.value == value, spec.name, ": dimension ", i, " (", names[i], ") is ", value, ", but ",
            known->second.value, " in ", known->second.from);
  }
}

int Signature::input(const char* name) const {
  const auto found =
      std::find_if(inputs.begin(), inputs.end(), [name](const TensorSpec& s) { return !std::strcmp(s.name, name); });
  return found == inputs.end() ? -1 : static_cast<int>(found - inputs.begin());
}

const TensorSpec& Signature::at(int position) const {
  const int first_output = static_cast<int>(inputs.size());
  require(position >= 0 && position < first_output + static_cast<int>(outputs.size()), "there is no tensor ", position);
  return position < first_output ? inputs[position] : outputs[position - first_output];
}

std::string Signature::refusal(int position, const nvinfer1::PluginTensorDesc& tensor, DataType element) const {
  const TensorSpec& spec = at(position);
  std::ostringstream reason;
  if (tensor.format != nvinfer1::TensorFormat::kLINEAR) {
    reason << spec.name << " must have the linear format, not format " << static_cast<int>(tensor.format);
    return reason.str();
  }
  std::vector<DataType> allowed;
  switch (spec.type) {
    case TypeRule::kElement:
      allowed = position == 0 ? element_types : std::vector<DataType>{element};
      break;
    case TypeRule::kFloat32:
      allowed = {DataType::kFLOAT};
      break;
    case TypeRule::kInt64:
      allowed = {DataType::kINT64};
      break;
    case TypeRule::kBool:
      allowed = {DataType::kBOOL};
      break;
  }
  if (std::find(allowed.begin(), allowed.end(), tensor.type) != allowed.end()) {
    return {};
  }
  reason << spec.name << " must be ";
  for (std::size_t i = 0; i < allowed.size(); ++i) {
    reason << (i == 0 ? "" : " or ") << typeName(allowed[i]);
  }
  if (spec.type == TypeRule::kElement && position != 0) {
    reason << " like " << inputs[0].name;
  }
  reason << ", not " << typeName(tensor.type);
  return reason.str();
}

void Signature::requireCounts(int inputs_given, int outputs_given) const {
  require(inputs_given == static_cast<int>(inputs.size()), "expected ", inputs.size(), " inputs, not ", inputs_given);
  require(outputs_given == static_cast<int>(outputs.size()), "expected ", outputs.size(), " outputs, not ",
          outputs_given);
}

const char* typeName(DataType type) {
  switch (type) {
    case DataType::kFLOAT:
      return "fp32";
    case DataType::kHALF:
      return "fp16";
    case DataType::kBF16:
      return "bf16";
    case DataType::kINT8:
      return "int8";
    case DataType::kUINT8:
      return "uint8";
    case DataType::kINT32:
      return "int32";
    case DataType::kINT64:
      return "int64";
    case DataType::kBOOL:
      return "bool";
    default:
      return "another type";
  }
}

}  // namespace dflash_trt
