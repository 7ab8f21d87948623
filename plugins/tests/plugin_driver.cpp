// Drives a plugin by commands from stdin, one a line, and prints JSON lines: the same program with a stand-in CUDA
// runtime (geometry and arguments) and on a GPU (results).
//
//   create NAME [field:type=value]...   types f32, f64, i32, i64, char; an empty value is no value
//   tensors                             forget the tensors
//   input TYPE DIMS [FILE]              TYPE fp32, fp16, bf16, int64, int32, bool; DIMS 1,8,4,64 or with ranges 1..8
//   output TYPE DIMS [INPUT]            INPUT: the position of the input whose buffer it shares
//   configure | shape_change | workspace | enqueue | clone
//   save OUTPUT FILE                    the output's bytes
//   fill OUTPUT BYTE                    before enqueue: poison
//   device N | setenv NAME VALUE
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>

#include "plugin_access.h"

namespace {

using namespace nvinfer1;
using test::Line;

void must(cudaError_t status, const std::string& what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(what + ": " + cudaGetErrorString(status));
  }
}

const std::map<std::string, std::pair<DataType, std::size_t>> kTypes{
    {"fp32", {DataType::kFLOAT, 4}}, {"fp16", {DataType::kHALF, 2}},  {"bf16", {DataType::kBF16, 2}},
    {"int64", {DataType::kINT64, 8}}, {"int32", {DataType::kINT32, 4}}, {"bool", {DataType::kBOOL, 1}}};

// A field that owns its value.
struct Field {
  std::string name;
  PluginFieldType type;
  std::string bytes;
};

template <typename Value>
std::string bytesOf(Value value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

Field parseField(const std::string& word) {
  const std::size_t colon = word.find(':');
  const std::size_t equals = word.find('=');
  const std::string name = word.substr(0, colon);
  const std::string type = word.substr(colon + 1, equals - colon - 1);
  const std::string value = word.substr(equals + 1);
  if (type == "char") {
    return {name, PluginFieldType::kCHAR, value};
  }
  if (value.empty()) {
    return {name, PluginFieldType::kFLOAT32, ""};
  }
  if (type == "f32") {
    return {name, PluginFieldType::kFLOAT32, bytesOf(std::stof(value))};
  }
  if (type == "f64") {
    return {name, PluginFieldType::kFLOAT64, bytesOf(std::stod(value))};
  }
  if (type == "i32") {
    return {name, PluginFieldType::kINT32, bytesOf(static_cast<std::int32_t>(std::stol(value)))};
  }
  return {name, PluginFieldType::kINT64, bytesOf(static_cast<std::int64_t>(std::stoll(value)))};
}

struct Tensor {
  DynamicPluginTensorDesc desc{};
  void* memory = nullptr;
  std::size_t bytes = 0;
  std::shared_ptr<void> owner;
};

class Driver {
 public:
  void run(const std::string& line) {
    std::istringstream words(line);
    std::string command;
    words >> command;
    const std::map<std::string, std::function<void(std::istringstream&)>> commands{
        {"create", [this](auto& w) { create(w); }},
        {"tensors", [this](auto&) { inputs_.clear(), outputs_.clear(); }},
        {"input", [this](auto& w) { input(w); }},
        {"output", [this](auto& w) { output(w); }},
        {"configure", [this](auto&) { configure(); }},
        {"shape_change", [this](auto&) { shapeChange(); }},
        {"workspace", [this](auto&) { workspace(); }},
        {"enqueue", [this](auto&) { enqueue(); }},
        {"clone", [this](auto&) { plugin_.reset(plugin_->clone()); }},
        {"save", [this](auto& w) { save(w); }},
        {"fill", [this](auto& w) { fill(w); }},
        {"device", [](auto& w) { setDevice(w); }},
        {"setenv", [](auto& w) { setVariable(w); }},
    };
    commands.at(command)(words);
  }

 private:
  void create(std::istringstream& words) {
    std::string name;
    words >> name;
    std::vector<Field> fields;
    for (std::string word; words >> word;) {
      fields.push_back(parseField(word));
    }
    std::vector<PluginField> views;
    for (const Field& field : fields) {
      const bool is_text = field.type == PluginFieldType::kCHAR;
      views.emplace_back(field.name.c_str(), field.bytes.empty() ? nullptr : field.bytes.data(), field.type,
                         is_text ? static_cast<std::int32_t>(field.bytes.size()) : 1);
    }
    const PluginFieldCollection collection{static_cast<std::int32_t>(views.size()), views.data()};
    plugin_.reset(test::creator(name).createPlugin("layer", &collection, TensorRTPhase::kBUILD));
    Line("create").add("made", plugin_ != nullptr);
  }

  // Shapes at run time are the upper ends of ranges.
  static Tensor parseTensor(std::istringstream& words) {
    std::string type;
    std::string dims;
    words >> type >> dims;
    Tensor tensor;
    tensor.desc.desc.type = kTypes.at(type).first;
    tensor.desc.desc.format = TensorFormat::kLINEAR;
    tensor.bytes = kTypes.at(type).second;
    std::istringstream parts(dims);
    for (std::string part; std::getline(parts, part, ',');) {
      const std::size_t range = part.find("..");
      const int i = tensor.desc.desc.dims.nbDims++;
      const std::int64_t most = std::stoll(range == std::string::npos ? part : part.substr(range + 2));
      tensor.desc.min.d[i] = std::stoll(part.substr(0, range));
      tensor.desc.opt.d[i] = tensor.desc.max.d[i] = most;
      tensor.desc.desc.dims.d[i] = range == std::string::npos ? most : -1;
      tensor.bytes *= static_cast<std::size_t>(most);
    }
    tensor.desc.min.nbDims = tensor.desc.opt.nbDims = tensor.desc.max.nbDims = tensor.desc.desc.dims.nbDims;
    return tensor;
  }

  static void allocate(Tensor& tensor) {
    must(cudaMalloc(&tensor.memory, std::max<std::size_t>(tensor.bytes, 1)), "cudaMalloc");
    tensor.owner = std::shared_ptr<void>(tensor.memory, [](void* memory) { cudaFree(memory); });
  }

  void input(std::istringstream& words) {
    Tensor tensor = parseTensor(words);
    std::string path;
    if (words >> path) {
      std::ifstream file(path, std::ios::binary);
      const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
      if (bytes.size() != tensor.bytes) {
        throw std::runtime_error(path + " has " + std::to_string(bytes.size()) + " bytes, not " +
                                 std::to_string(tensor.bytes));
      }
      allocate(tensor);
      must(cudaMemcpy(tensor.memory, bytes.data(), tensor.bytes, cudaMemcpyHostToDevice), path);
    }
    inputs_.push_back(tensor);
  }

  void output(std::istringstream& words) {
    Tensor tensor = parseTensor(words);
    std::size_t shared = 0;
    if (words >> shared) {
      tensor.memory = memoryOf(inputs_.at(shared));
      tensor.owner = inputs_.at(shared).owner;
    }
    outputs_.push_back(tensor);
  }

  // Inputs without a file get memory when it is first asked for.
  static void* memoryOf(Tensor& tensor) {
    if (tensor.memory == nullptr) {
      allocate(tensor);
    }
    return tensor.memory;
  }

  static std::vector<DynamicPluginTensorDesc> ranges(const std::vector<Tensor>& tensors) {
    std::vector<DynamicPluginTensorDesc> result;
    for (const Tensor& tensor : tensors) {
      result.push_back(tensor.desc);
    }
    return result;
  }
  static std::vector<PluginTensorDesc> shapes(const std::vector<Tensor>& tensors) {
    std::vector<PluginTensorDesc> result;
    for (const Tensor& tensor : tensors) {
      result.push_back(tensor.desc.desc);
      result.back().dims = tensor.desc.max;
    }
    return result;
  }

  void configure() {
    const auto inputs = ranges(inputs_);
    const auto outputs = ranges(outputs_);
    const int status =
        test::build(*plugin_).configurePlugin(inputs.data(), count(inputs), outputs.data(), count(outputs));
    Line("configure").add("status", status);
  }

  void shapeChange() {
    const auto inputs = shapes(inputs_);
    const auto outputs = shapes(outputs_);
    const int status =
        test::runtime(*plugin_).onShapeChange(inputs.data(), count(inputs), outputs.data(), count(outputs));
    Line("shape_change").add("status", status);
    if (status == 0) {
      allocateAll();
    }
  }

  // Before enqueue, which may be captured.
  void allocateAll() {
    std::for_each(inputs_.begin(), inputs_.end(), memoryOf);
    std::for_each(outputs_.begin(), outputs_.end(), memoryOf);
    workspace_ = {};
    workspace_.bytes = workspaceSize();
    allocate(workspace_);
  }

  std::size_t workspaceSize() {
    const auto inputs = ranges(inputs_);
    const auto outputs = ranges(outputs_);
    return test::build(*plugin_).getWorkspaceSize(inputs.data(), count(inputs), outputs.data(), count(outputs));
  }

  void workspace() { Line("workspace").add("bytes", workspaceSize()); }

  void enqueue() {
    const auto input_shapes = shapes(inputs_);
    const auto output_shapes = shapes(outputs_);
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    for (const Tensor& tensor : inputs_) {
      inputs.push_back(tensor.memory);
    }
    for (const Tensor& tensor : outputs_) {
      outputs.push_back(tensor.memory);
    }
    const int status = test::runtime(*plugin_).enqueue(input_shapes.data(), output_shapes.data(), inputs.data(),
                                                       outputs.data(), workspace_.memory, nullptr);
    Line("enqueue")
        .add("status", status)
        .add("inputs", addresses(inputs_))
        .add("outputs", addresses(outputs_))
        .add("workspace", reinterpret_cast<std::uintptr_t>(workspace_.memory));
  }

  void save(std::istringstream& words) {
    std::size_t output = 0;
    std::string path;
    words >> output >> path;
    const Tensor& tensor = outputs_.at(output);
    std::string bytes(tensor.bytes, '\0');
    must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    must(cudaMemcpy(bytes.data(), tensor.memory, tensor.bytes, cudaMemcpyDeviceToHost), path);
    std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }

  void fill(std::istringstream& words) {
    std::size_t output = 0;
    int byte = 0;
    words >> output >> byte;
    Tensor& tensor = outputs_.at(output);
    must(cudaMemset(memoryOf(tensor), byte, tensor.bytes), "cudaMemset");
  }

  static void setDevice(std::istringstream& words) {
    int device = 0;
    words >> device;
    must(cudaSetDevice(device), "cudaSetDevice");
  }

  static void setVariable(std::istringstream& words) {
    std::string name;
    std::string value;
    words >> name >> value;
    setenv(name.c_str(), value.c_str(), 1);
  }

  template <typename Values>
  static std::int32_t count(const Values& values) {
    return static_cast<std::int32_t>(values.size());
  }

  static std::string addresses(const std::vector<Tensor>& tensors) {
    std::vector<std::uintptr_t> result;
    for (const Tensor& tensor : tensors) {
      result.push_back(reinterpret_cast<std::uintptr_t>(tensor.memory));
    }
    return test::list(result);
  }

  std::unique_ptr<IPluginV3> plugin_;
  std::vector<Tensor> inputs_;
  std::vector<Tensor> outputs_;
  Tensor workspace_;
};

}  // namespace

int main() {
  test::JsonLoggerFinder finder;
  setLoggerFinder(&finder);
  Driver driver;
  for (std::string line; std::getline(std::cin, line);) {
    try {
      driver.run(line);
    } catch (const std::exception& error) {
      std::cerr << "plugin_driver: '" << line << "': " << error.what() << "\n";
      return 1;
    }
  }
  setLoggerFinder(nullptr);
}
