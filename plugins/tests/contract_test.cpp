// What the plugins answer TensorRT while it builds: data types, formats, output shapes, aliasing, and that an object
// survives cloning and serialisation. Prints JSON lines; tests/plugins/test_plugin_contract.py judges them.
//
// Arguments: stand-ins for runtimes of several versions, to log through.
#include <dlfcn.h>

#include <map>
#include <optional>

#include "plugin_access.h"

namespace {

using namespace nvinfer1;
using test::Line;

constexpr int kDataTypes = 11;  // kFLOAT .. kFP4, those that TensorRT 10 and 11 both have
constexpr int kFormats = 13;

// ---- An expression builder whose expressions are text.

class FakeExpression final : public IDimensionExpr, private apiv::VDimensionExpr {
 public:
  FakeExpression(std::string text, std::optional<std::int64_t> value) : text(std::move(text)), value_(value) {
    mImpl = this;
  }
  const std::string text;

 private:
  bool isConstant() const override { return value_.has_value(); }
  std::int64_t getConstantValue() const override { return value_.value_or(-1); }
  bool isSizeTensor() const override { return false; }

  std::optional<std::int64_t> value_;
};

class FakeBuilder final : public IExprBuilder, private apiv::VExprBuilder {
 public:
  FakeBuilder() { mImpl = this; }

  const IDimensionExpr* symbol(const std::string& name) { return make(name, std::nullopt); }
  const IDimensionExpr* constant(std::int64_t value) override { return make(std::to_string(value), value); }
  const IDimensionExpr* operation(DimensionOperation op, const IDimensionExpr& first,
                                  const IDimensionExpr& second) override {
    static const std::map<DimensionOperation, std::string> kSigns{{DimensionOperation::kSUM, "+"},
                                                                  {DimensionOperation::kPROD, "*"},
                                                                  {DimensionOperation::kSUB, "-"}};
    const auto sign = kSigns.find(op);
    return make(textOf(first) + (sign == kSigns.end() ? "?" : sign->second) + textOf(second), std::nullopt);
  }
  const IDimensionExpr* declareSizeTensor(std::int32_t, const IDimensionExpr&, const IDimensionExpr&) override {
    return nullptr;
  }
  static std::string textOf(const IDimensionExpr& expression) {
    return static_cast<const FakeExpression&>(expression).text;
  }

 private:
  const IDimensionExpr* make(const std::string& text, std::optional<std::int64_t> value) {
    made_.push_back(std::make_unique<FakeExpression>(text, value));
    return made_.back().get();
  }
  std::vector<std::unique_ptr<FakeExpression>> made_;
};

// Dimensions by name; a number is a constant.
DimsExprs expressions(FakeBuilder& builder, const std::vector<std::string>& names) {
  DimsExprs dims{};
  dims.nbDims = static_cast<int>(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    const bool is_number = names[i].find_first_not_of("0123456789") == std::string::npos;
    dims.d[i] = is_number ? builder.constant(std::stoll(names[i])) : builder.symbol(names[i]);
  }
  return dims;
}

// ---- The plugins under test.

struct Subject {
  std::string name;
  std::vector<PluginField> fields;
  int outputs;
  std::vector<std::vector<std::string>> dims;  // of the inputs, the optional one included
  std::size_t optional;

  std::unique_ptr<IPluginV3> create(const PluginFieldCollection* from = nullptr) const {
    const PluginFieldCollection own{static_cast<std::int32_t>(fields.size()), fields.data()};
    const TensorRTPhase phase = from == nullptr ? TensorRTPhase::kBUILD : TensorRTPhase::kRUNTIME;
    return std::unique_ptr<IPluginV3>(test::creator(name).createPlugin("layer", from == nullptr ? &own : from, phase));
  }
  std::vector<std::vector<std::string>> inputs(bool with_optional) const {
    auto result = dims;
    if (!with_optional) {
      result.erase(result.begin() + static_cast<std::ptrdiff_t>(optional));
    }
    return result;
  }
};

const float kEps = 1e-6F;
const float kScale = 0.125F;
const float kSoftcap = 30.0F;
const std::int32_t kWindow = 1024;
const std::int64_t kCausal = 1;  // as the ONNX parser may hand an INT attribute over

const std::vector<Subject> kSubjects{
    {"KVInjection",
     {{"eps", &kEps, PluginFieldType::kFLOAT32, 1}},
     2,
     {{"B", "N", "8", "128"}, {"B", "N", "8", "128"}, {"128"}, {"B", "N"}, {"4096", "64"}, {"4096", "64"}, {"B"},
      {"B", "8", "C", "128"}, {"B", "8", "C", "128"}},
     2},
    {"StaircaseAttention",
     {{"scale", &kScale, PluginFieldType::kFLOAT32, 1},
      {"sliding_window", &kWindow, PluginFieldType::kINT32, 1},
      {"causal", &kCausal, PluginFieldType::kINT64, 1},
      {"softcap", &kSoftcap, PluginFieldType::kFLOAT32, 1}},
     1,
     {{"B", "32", "Q", "128"}, {"B", "8", "C", "128"}, {"B", "8", "C", "128"}, {"B"}, {"B", "Q", "Q"}, {"32"},
      {"B", "Q"}},
     5},
};

// ---- What is printed.

void printFormats(const Subject& subject, bool with_optional) {
  const auto plugin = subject.create();
  const int inputs = static_cast<int>(subject.inputs(with_optional).size());
  int asked = 0;
  // The answer for a position may depend on the first input's type only, which is tried with every type there is.
  for (int position = 0; position < inputs + subject.outputs; ++position) {
    for (int element = 0; element < (position == 0 ? 1 : kDataTypes); ++element) {
      std::vector<std::string> accepted;
      for (int type = 0; type < kDataTypes; ++type) {
        for (int format = 0; format < kFormats; ++format) {
          std::vector<DynamicPluginTensorDesc> tensors(inputs + subject.outputs);
          tensors[0].desc.type = static_cast<DataType>(element);
          tensors[position].desc.type = static_cast<DataType>(type);
          tensors[position].desc.format = static_cast<TensorFormat>(format);
          ++asked;
          if (test::build(*plugin).supportsFormatCombination(position, tensors.data(), inputs, subject.outputs)) {
            accepted.push_back("[" + std::to_string(type) + ", " + std::to_string(format) + "]");
          }
        }
      }
      Line("formats")
          .text("plugin", subject.name)
          .add("inputs", inputs)
          .add("position", position)
          .add("element", position == 0 ? -1 : element)
          .add("accepted", test::list(accepted));
    }
  }
  Line("formats_asked").text("plugin", subject.name).add("inputs", inputs).add("count", asked);
}

void printShapesTypesAliases(const Subject& subject, bool with_optional) {
  const auto plugin = subject.create();
  const auto inputs = subject.inputs(with_optional);
  const int input_count = static_cast<int>(inputs.size());
  FakeBuilder builder;
  std::vector<DimsExprs> input_dims;
  for (const auto& names : inputs) {
    input_dims.push_back(expressions(builder, names));
  }
  std::vector<DimsExprs> output_dims(subject.outputs);
  const int status = test::build(*plugin).getOutputShapes(input_dims.data(), input_count, nullptr, 0,
                                                          output_dims.data(), subject.outputs, builder);
  std::vector<std::string> shapes;
  for (const DimsExprs& dims : output_dims) {
    std::vector<std::string> names;
    for (int i = 0; i < dims.nbDims; ++i) {
      names.push_back(test::quoted(FakeBuilder::textOf(*dims.d[i])));
    }
    shapes.push_back(test::list(names));
  }
  std::vector<DataType> types(input_count, DataType::kINT64);
  types[0] = DataType::kBF16;
  std::vector<DataType> output_types(subject.outputs, DataType::kFLOAT);
  const int types_status =
      test::build(*plugin).getOutputDataTypes(output_types.data(), subject.outputs, types.data(), input_count);
  std::vector<int> printed_types;
  std::vector<int> aliases;
  for (int i = 0; i < subject.outputs; ++i) {
    printed_types.push_back(static_cast<int>(output_types[i]));
    aliases.push_back(test::build(*plugin).getAliasedInput(i));
  }
  std::unique_ptr<IPluginV3> clone(plugin->clone());
  Line("outputs")
      .text("plugin", subject.name)
      .add("inputs", input_count)
      .add("count", test::build(*plugin).getNbOutputs())
      .add("shapes_status", status)
      .add("shapes", test::list(shapes))
      .add("types_status", types_status)
      .add("types", test::list(printed_types))
      .add("aliases", test::list(aliases))
      .add("alias_of_clone", test::build(*clone).getAliasedInput(0));
}

void printRefusedShapes(const Subject& subject) {
  const auto plugin = subject.create();
  FakeBuilder builder;
  const auto attempt = [&](const std::string& what, const std::vector<std::vector<std::string>>& inputs, int outputs) {
    std::vector<DimsExprs> input_dims;
    for (const auto& names : inputs) {
      input_dims.push_back(expressions(builder, names));
    }
    std::vector<DimsExprs> output_dims(4);
    const int status = test::build(*plugin).getOutputShapes(input_dims.data(), static_cast<int>(input_dims.size()),
                                                            nullptr, 0, output_dims.data(), outputs, builder);
    Line("refused_shapes").text("plugin", subject.name).text("what", what).add("status", status);
  };
  auto rank = subject.dims;
  rank[0].pop_back();
  attempt("rank", rank, subject.outputs);
  auto unequal = subject.dims;
  unequal[1][3] = "64";
  attempt("unequal", unequal, subject.outputs);
  auto head_dim = subject.dims;
  for (auto& names : head_dim) {
    for (auto& name : names) {
      name = name == "128" ? "80" : name;
    }
  }
  attempt("head_dim", head_dim, subject.outputs);
  attempt("inputs", {subject.dims[0], subject.dims[1]}, subject.outputs);
  attempt("outputs", subject.dims, subject.outputs + 1);
}

void printIdentity(const Subject& subject) {
  const auto plugin = subject.create();
  std::unique_ptr<IPluginV3> clone(plugin->clone());
  std::unique_ptr<IPluginV3> attached(test::runtime(*plugin).attachToContext(nullptr));
  const PluginFieldCollection* serialized = test::runtime(*plugin).getFieldsToSerialize();
  const auto loaded = subject.create(serialized);
  // The creator's promise outlives the object that wrote the fields.
  const std::string fields = test::fieldsJson(serialized);
  Line("identity")
      .text("name", test::core(*plugin).getPluginName())
      .text("version", test::core(*plugin).getPluginVersion())
      .text("namespace", test::core(*plugin).getPluginNamespace())
      .text("metadata", test::build(*plugin).getMetadataString())
      .text("timing_cache_id", test::build(*plugin).getTimingCacheID())
      .add("serialized", fields)
      .add("loaded", test::fieldsJson(test::runtime(*loaded).getFieldsToSerialize()))
      .add("clone", test::fieldsJson(test::runtime(*clone).getFieldsToSerialize()))
      .add("attached", test::fieldsJson(test::runtime(*attached).getFieldsToSerialize()))
      .text("metadata_of_clone", test::build(*clone).getMetadataString());
}

void printLoggingThrough(const char* runtime) {
  void* library = dlopen(runtime, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw std::runtime_error(dlerror());
  }
  const auto fake_finder = reinterpret_cast<ILoggerFinder* (*)(bool)>(dlsym(library, "fakeFinder"));
  for (const bool in_engine : {true, false}) {
    setLoggerFinder(fake_finder(in_engine));
    const PluginFieldCollection nothing{};
    test::creator("KVInjection").createPlugin("layer", &nothing, TensorRTPhase::kBUILD);
  }
}

}  // namespace

int main(int count, char** arguments) {
  test::JsonLoggerFinder finder;
  setLoggerFinder(&finder);
  for (const Subject& subject : kSubjects) {
    const auto fresh = subject.create();
    Line("alias_too_early").text("plugin", subject.name).add("input", test::build(*fresh).getAliasedInput(0));
    for (const bool with_optional : {true, false}) {
      printFormats(subject, with_optional);
      printShapesTypesAliases(subject, with_optional);
    }
    printRefusedShapes(subject);
    printIdentity(subject);
  }
  for (int i = 1; i < count; ++i) {
    printLoggingThrough(arguments[i]);
  }
  setLoggerFinder(nullptr);
}
