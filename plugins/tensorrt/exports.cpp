// The two entry points by which TensorRT finds the plugins of a library. exports.map lists all that is exported.
#include <NvInferRuntime.h>

#include <array>

#include "creator.h"
#include "kv_injection/kv_injection_plugin.h"
#include "logger.h"
#include "staircase_attention/staircase_attention_plugin.h"

#define DFLASH_TRT_EXPORT extern "C" __attribute__((visibility("default")))

DFLASH_TRT_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(std::int32_t& count) {
  static dflash_trt::Creator<dflash_trt::KvInjectionPlugin> kv_injection;
  static dflash_trt::Creator<dflash_trt::StaircaseAttentionPlugin> staircase_attention;
  static const std::array<nvinfer1::IPluginCreatorInterface*, 2> creators{&kv_injection, &staircase_attention};
  count = static_cast<std::int32_t>(creators.size());
  return creators.data();
}

DFLASH_TRT_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { dflash_trt::setFinder(finder); }
