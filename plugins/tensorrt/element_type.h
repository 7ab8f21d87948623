#pragma once

#include <NvInferRuntime.h>

#include "error.h"
#include "signature.h"

namespace dflash_trt {

// The dtype as kernel variants spell it.
inline const char* kernelDtype(nvinfer1::DataType type) {
  switch (type) {
    case nvinfer1::DataType::kHALF:
      return "fp16";
    case nvinfer1::DataType::kBF16:
      return "bf16";
    case nvinfer1::DataType::kFLOAT:
      return "fp32";
    default:
      fail("there are no kernels for ", typeName(type));
  }
}

}  // namespace dflash_trt
