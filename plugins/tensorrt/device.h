#pragma once

namespace dflash_trt {

struct Device {
  int id;
  int major;
  int minor;
  int multiprocessors;

  // Which of the compiled architectures serves it: 80, 90, 100 or 120. Only 8.x run each other's cubins (those for 8.0
  // stay under the shared memory of 8.6 and 8.9); from 9.0 on they are specific to their architecture.
  int architecture() const;
};

// The device of the calling thread's context; asked of CUDA once per device.
Device currentDevice();

}  // namespace dflash_trt
