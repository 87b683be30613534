// The host side of NVSHMEM's device library, which has a state of its own in every library that it is linked into.
#include <cuda_runtime.h>
#include <host/nvshmem_api.h>
#include <host/nvshmemx_api.h>

#include "epcy/put.h"

int epcy_put_load();

extern "C" int epcy_put_start(int device) {
  static bool started = false;
  if (started) return 0;
  const cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  const nvshmemi_version_t version = {NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                                      NVSHMEM_VENDOR_PATCH_VERSION};
  int provided = 0;
  // What nvshmem_init() calls, which would end the process where this fails. NVSHMEM runs already: this copies its state.
  const int status = nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED, &provided, 0, nullptr, version);
  if (status) return status;
  const int loading = epcy_put_load();
  started = loading == 0;
  return loading;
}

extern "C" int epcy_put_quiet(void *stream) {
  nvshmemx_quiet_on_stream((cudaStream_t)stream);
  return 0;
}
