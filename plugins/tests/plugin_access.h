// The plugin library as TensorRT sees it: creators by name, and a logger that turns messages into JSON lines.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "json.h"

extern "C" nvinfer1::IPluginCreatorInterface* const* getCreators(std::int32_t& count);
extern "C" void setLoggerFinder(nvinfer1::ILoggerFinder* finder);

namespace test {

class JsonLogger final : public nvinfer1::ILogger {
 public:
  void log(Severity severity, const char* message) noexcept override {
    if (severity <= Severity::kWARNING) {
      Line("log").add("severity", static_cast<int>(severity)).text("message", message);
    }
  }
};

class JsonLoggerFinder final : public nvinfer1::ILoggerFinder {
 public:
  nvinfer1::ILogger* findLogger() override { return &logger_; }

 private:
  JsonLogger logger_;
};

inline nvinfer1::IPluginCreatorV3One& creator(const std::string& name) {
  std::int32_t count = 0;
  nvinfer1::IPluginCreatorInterface* const* creators = getCreators(count);
  for (std::int32_t i = 0; i < count; ++i) {
    auto* candidate = static_cast<nvinfer1::IPluginCreatorV3One*>(creators[i]);
    if (name == candidate->getPluginName()) {
      return *candidate;
    }
  }
  throw std::runtime_error("there is no creator " + name);
}

template <typename Interface>
Interface& capability(nvinfer1::IPluginV3& plugin, nvinfer1::PluginCapabilityType type) {
  return *static_cast<Interface*>(plugin.getCapabilityInterface(type));
}
inline nvinfer1::IPluginV3OneCore& core(nvinfer1::IPluginV3& plugin) {
  return capability<nvinfer1::IPluginV3OneCore>(plugin, nvinfer1::PluginCapabilityType::kCORE);
}
inline nvinfer1::IPluginV3OneBuildV2& build(nvinfer1::IPluginV3& plugin) {
  return capability<nvinfer1::IPluginV3OneBuildV2>(plugin, nvinfer1::PluginCapabilityType::kBUILD);
}
inline nvinfer1::IPluginV3OneRuntime& runtime(nvinfer1::IPluginV3& plugin) {
  return capability<nvinfer1::IPluginV3OneRuntime>(plugin, nvinfer1::PluginCapabilityType::kRUNTIME);
}

inline std::string fieldsJson(const nvinfer1::PluginFieldCollection* fields) {
  std::vector<std::string> entries;
  for (std::int32_t i = 0; fields != nullptr && i < fields->nbFields; ++i) {
    const nvinfer1::PluginField& field = fields->fields[i];
    std::ostringstream entry;
    entry.precision(9);
    entry << "{\"name\": " << quoted(field.name) << ", \"type\": " << static_cast<int>(field.type)
          << ", \"length\": " << field.length << ", \"value\": ";
    if (field.type == nvinfer1::PluginFieldType::kFLOAT32) {
      float value;
      std::memcpy(&value, field.data, sizeof value);
      entry << value;
    } else {
      std::int32_t value;
      std::memcpy(&value, field.data, sizeof value);
      entry << value;
    }
    entry << "}";
    entries.push_back(entry.str());
  }
  return list(entries);
}

}  // namespace test
