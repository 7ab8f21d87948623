// Messages go to the logger of the TensorRT runtime that loaded the library.
#pragma once

#include <NvInferRuntime.h>

#include <string>

namespace dflash_trt {

using Severity = nvinfer1::ILogger::Severity;

// Without a logger, errors go to stderr and everything else is dropped.
void log(Severity severity, const std::string& message) noexcept;

void setFinder(nvinfer1::ILoggerFinder* finder) noexcept;

}  // namespace dflash_trt
