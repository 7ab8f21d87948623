// A stand-in for a TensorRT runtime's library, compiled once for each layout of the logging interfaces: they got a
// versioned base class in 11. FAKE_TENSORRT_MAJOR tells which; the messages say which runtime got them.
#include <cstdint>

#include "json.h"

namespace {

#if FAKE_TENSORRT_MAJOR >= 11
class Base {  // the vtable of nvinfer1::IVersionedInterface
 public:
  virtual int getAPILanguage() const noexcept { return 0; }
  virtual int getInterfaceInfo() const noexcept { return 0; }
  virtual ~Base() noexcept = default;
};
#else
class Base {};
#endif

class Logger : public Base {
 public:
  explicit Logger(const char* name) : name_(name) {}
  virtual void log(std::int32_t severity, const char* message) noexcept {
    test::Line("runtime_log")
        .add("major", FAKE_TENSORRT_MAJOR)
        .text("logger", name_)
        .add("severity", severity)
        .text("message", message);
  }

 private:
  const char* name_;
};

Logger engine_logger("engine");
Logger global_logger("global");

class Finder : public Base {
 public:
  virtual void* findLogger() { return in_engine ? &engine_logger : nullptr; }
  bool in_engine = true;
};

Finder finder;

}  // namespace

extern "C" {
std::int32_t getInferLibMajorVersion() { return FAKE_TENSORRT_MAJOR; }
void* getLogger() { return &global_logger; }
void* fakeFinder(bool in_engine) {
  finder.in_engine = in_engine;
  return &finder;
}
}
