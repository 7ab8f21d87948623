#include "fields.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "error.h"

namespace dflash_trt {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

const PluginField* find(const std::vector<PluginField>& fields, const char* name) {
  const auto found =
      std::find_if(fields.begin(), fields.end(), [name](const PluginField& f) { return !std::strcmp(f.name, name); });
  return found == fields.end() ? nullptr : &*found;
}

const char* typeName(PluginFieldType type) {
  switch (type) {
    case PluginFieldType::kFLOAT16:
      return "float16";
    case PluginFieldType::kFLOAT32:
      return "float32";
    case PluginFieldType::kFLOAT64:
      return "float64";
    case PluginFieldType::kINT8:
      return "int8";
    case PluginFieldType::kINT16:
      return "int16";
    case PluginFieldType::kINT32:
      return "int32";
    case PluginFieldType::kINT64:
      return "int64";
    case PluginFieldType::kCHAR:
      return "char";
    default:
      return "another type";
  }
}

// A deserialised field need not be aligned.
template <typename Value>
Value read(const PluginField& field) {
  Value value;
  std::memcpy(&value, field.data, sizeof value);
  return value;
}

}  // namespace

FieldReader::FieldReader(const nvinfer1::PluginFieldCollection* fields, const std::vector<PluginField>& known) {
  require(fields != nullptr && (fields->nbFields == 0 || fields->fields != nullptr), "there are no fields");
  for (std::int32_t i = 0; i < fields->nbFields; ++i) {
    const PluginField& field = fields->fields[i];
    require(field.name != nullptr, "field ", i, " has no name");
    if (!std::strcmp(field.name, "plugin_version") || !std::strcmp(field.name, "plugin_namespace")) {
      continue;
    }
    require(find(known, field.name) != nullptr, "unknown field ", field.name);
    require(find(fields_, field.name) == nullptr, "field ", field.name, " is given twice");
    fields_.push_back(field);
  }
}

const PluginField& FieldReader::scalar(const char* name) const {
  const PluginField* field = find(fields_, name);
  require(field != nullptr, "field ", name, " is missing");
  require(field->length == 1, "field ", name, " must be a single value, not ", field->length);
  require(field->data != nullptr, "field ", name, " has no value");
  return *field;
}

float FieldReader::float32(const char* name) const {
  const PluginField& field = scalar(name);
  require(field.type == PluginFieldType::kFLOAT32, "field ", name, " must be float32, not ", typeName(field.type));
  return read<float>(field);
}

std::int32_t FieldReader::int32(const char* name) const {
  const PluginField& field = scalar(name);
  require(field.type == PluginFieldType::kINT32 || field.type == PluginFieldType::kINT64, "field ", name,
          " must be int32 or int64, not ", typeName(field.type));
  if (field.type == PluginFieldType::kINT32) {
    return read<std::int32_t>(field);
  }
  const std::int64_t value = read<std::int64_t>(field);
  require(value >= std::numeric_limits<std::int32_t>::min() && value <= std::numeric_limits<std::int32_t>::max(),
          "field ", name, " is ", value, ", more than 32 bits hold");
  return static_cast<std::int32_t>(value);
}

}  // namespace dflash_trt
