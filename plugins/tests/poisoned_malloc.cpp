// Device memory that is full of NaN when it is handed out, workspaces too: linked into plugin_driver with
// `--wrap=cudaMalloc`, so that a plugin that reads what nobody wrote is found.
#include <cuda_runtime_api.h>

extern "C" {
cudaError_t __real_cudaMalloc(void** memory, size_t bytes);

cudaError_t __wrap_cudaMalloc(void** memory, size_t bytes) {
  const cudaError_t status = __real_cudaMalloc(memory, bytes);
  return status == cudaSuccess ? cudaMemset(*memory, 0xFF, bytes) : status;
}
}
