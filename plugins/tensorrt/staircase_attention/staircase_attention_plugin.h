// StaircaseAttention: attention of a small set of new tokens over a long shared context plus themselves.
//
//   input         type     shape               output   type  shape
//   query         T        [B, Hq, Q, D]       output   T     [B, Q, Hq * D]
//   key_cache     T        [B, Hkv, C, D]
//   value_cache   T        [B, Hkv, C, D]
//   context_len   int64    [B]
//   visibility    bool     [B, Q, Q]
//   sinks         T        [Hq], may be left out
//   position_ids  int64    [B, Q]
//
// T: fp16 or bf16. Attributes: scale, sliding_window, causal, softcap.
#pragma once

#include "../fields.h"
#include "../kernels.h"
#include "../plugin.h"

namespace dflash_trt {

class StaircaseAttentionPlugin final : public Plugin {
 public:
  static constexpr const char* kName = "StaircaseAttention";
  static std::vector<nvinfer1::PluginField> fieldNames();

  explicit StaircaseAttentionPlugin(const FieldReader& fields);

 protected:
  Plugin* copy() const override { return new StaircaseAttentionPlugin(*this); }
  std::vector<nvinfer1::PluginField> fields() const override;
  const Signature& signature(int input_count) const override;
  void check(const Sizes& sizes) const override;
  void outputShapes(const nvinfer1::DimsExprs* inputs, const Signature& signature, nvinfer1::DimsExprs* outputs,
                    nvinfer1::IExprBuilder& builder) const override;
  int aliasedInput(int, const Signature&) const override { return -1; }
  std::size_t workspaceSize(const nvinfer1::DynamicPluginTensorDesc* inputs, const Signature& signature) const override;
  void prepare(const Sizes& sizes, nvinfer1::DataType element) override;
  void launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
              const Signature& signature) const override;

 private:
  struct Attributes {
    float scale;
    std::int32_t sliding_window;
    std::int32_t causal;
    float softcap;
  };
  // What a launch needs of the shapes.
  struct Prepared {
    Kernel context;
    Kernel merge;  // loaded where there are splits to merge
    int batch = 0;
    int queries = 0;
    int capacity = 0;
    int kv_heads = 0;
    int group = 0;
    int head_dim = 0;
    int splits = 1;
  };

  static Attributes read(const FieldReader& fields);
  static std::string describe(const Attributes& attributes);
  explicit StaircaseAttentionPlugin(const Attributes& attributes);

  KernelKey contextKey(nvinfer1::DataType element, int head_dim) const;

  Attributes attributes_;
  Prepared prepared_;
};

}  // namespace dflash_trt
