// KVInjection: normalise, rotate and write new keys and values into a cache of fixed capacity.
//
//   input            type     shape                 output        aliases
//   key              T        [B, N, Hkv, D]        key_cache     key_cache
//   value            T        [B, N, Hkv, D]        value_cache   value_cache
//   key_norm_weight  T        [D], may be left out
//   position_ids     int64    [B, N]
//   cos, sin         fp32     [P, R], 2 R <= D
//   write_start      int64    [B]
//   key_cache        T        [B, Hkv, C, D]
//   value_cache      T        [B, Hkv, C, D]
//
// T: fp16, bf16 or fp32. Attribute: eps.
#pragma once

#include "../fields.h"
#include "../kernels.h"
#include "../plugin.h"

namespace dflash_trt {

class KvInjectionPlugin final : public Plugin {
 public:
  static constexpr const char* kName = "KVInjection";
  static std::vector<nvinfer1::PluginField> fieldNames();

  explicit KvInjectionPlugin(const FieldReader& fields);

 protected:
  Plugin* copy() const override { return new KvInjectionPlugin(*this); }
  std::vector<nvinfer1::PluginField> fields() const override;
  const Signature& signature(int input_count) const override;
  void check(const Sizes& sizes) const override;
  void outputShapes(const nvinfer1::DimsExprs* inputs, const Signature& signature, nvinfer1::DimsExprs* outputs,
                    nvinfer1::IExprBuilder& builder) const override;
  int aliasedInput(int output, const Signature& signature) const override;
  std::size_t workspaceSize(const nvinfer1::DynamicPluginTensorDesc*, const Signature&) const override { return 0; }
  void prepare(const Sizes& sizes, nvinfer1::DataType element) override;
  void launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
              const Signature& signature) const override;

 private:
  // What a launch needs of the shapes.
  struct Prepared {
    Kernel kernel;
    int batch = 0;
    int rows = 0;
    int capacity = 0;
    int kv_heads = 0;
    int max_positions = 0;
    int rotary_half = 0;
  };

  float eps_;
  Prepared prepared_;
};

}  // namespace dflash_trt
