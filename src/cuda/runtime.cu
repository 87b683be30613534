// The host side of CUDA and NVSHMEM, as plain C functions. Kernels reach peers by plain pointers, so only NVSHMEM's host
// library is linked.
#include <cuda_runtime.h>
#include <host/nvshmem_api.h>
#include <host/nvshmemx_api.h>

#include <sched.h>
#include <time.h>

#include <cstring>

#include "epcy/cuda.h"

int epcy_cuda_load_dispatch();
int epcy_cuda_load_dispatch_expert();
int epcy_cuda_load_combine();
int epcy_cuda_load_combine_expert();

extern "C" {

const char *epcy_cuda_error_name(int code) { return cudaGetErrorString((cudaError_t)code); }
int epcy_cuda_num_devices(int *count) { return cudaGetDeviceCount(count); }

int epcy_cuda_set_device(int device, int *previous) {
  cudaError_t e = previous ? cudaGetDevice(previous) : cudaSuccess;
  if (e == cudaSuccess && !(previous && *previous == device)) e = cudaSetDevice(device);
  return e;
}

int epcy_cuda_mapped(int64_t bytes, void **host, void **device) {
  cudaError_t e = cudaHostAlloc(host, (size_t)bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  if (e == cudaSuccess) memset(*host, 0, (size_t)bytes);
  return e == cudaSuccess ? cudaHostGetDevicePointer(device, *host, 0) : e;
}
void epcy_cuda_unmap(void *host) { cudaFreeHost(host); }

int epcy_cuda_zero(void *device, int64_t bytes) {
  const cudaError_t e = cudaMemset(device, 0, (size_t)bytes);
  return e == cudaSuccess ? cudaDeviceSynchronize() : e;
}

// The default streams would wait for kernels that wait for us: use a stream that waits for nothing.
static int copy_aside(void *to, const void *from, int64_t bytes, cudaMemcpyKind kind) {
  cudaStream_t stream;
  cudaError_t e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (e != cudaSuccess) return e;
  e = cudaMemcpyAsync(to, from, (size_t)bytes, kind, stream);
  if (e == cudaSuccess) e = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  return e;
}
int epcy_cuda_fetch(void *host, const void *device, int64_t bytes) {
  return copy_aside(host, device, bytes, cudaMemcpyDeviceToHost);
}
int epcy_cuda_put(void *device, const void *host, int64_t bytes) {
  return copy_aside(device, host, bytes, cudaMemcpyHostToDevice);
}

int epcy_cuda_stage(void *to, const void *from, int64_t rows, int64_t row_bytes, int64_t stride_bytes, void *stream) {
  if (rows == 0) return 0;
  if (stride_bytes == row_bytes)
    return cudaMemcpyAsync(to, from, (size_t)(rows * row_bytes), cudaMemcpyDeviceToDevice, (cudaStream_t)stream);
  return cudaMemcpy2DAsync(to, (size_t)row_bytes, from, (size_t)stride_bytes, (size_t)row_bytes, (size_t)rows,
                           cudaMemcpyDeviceToDevice, (cudaStream_t)stream);
}

int epcy_cuda_stream(void **stream) {
  int least = 0, greatest = 0;
  cudaError_t e = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  return e == cudaSuccess ? cudaStreamCreateWithPriority((cudaStream_t *)stream, cudaStreamNonBlocking, greatest) : e;
}
void epcy_cuda_stream_free(void *stream) { cudaStreamDestroy((cudaStream_t)stream); }

int epcy_cuda_is_capturing(void *stream, int *yes) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t e = cudaStreamIsCapturing((cudaStream_t)stream, &status);
  *yes = status != cudaStreamCaptureStatusNone;
  return e;
}

int epcy_cuda_event(void **event) { return cudaEventCreateWithFlags((cudaEvent_t *)event, cudaEventDisableTiming); }
void epcy_cuda_event_free(void *event) { cudaEventDestroy((cudaEvent_t)event); }
int epcy_cuda_event_record(void *event, void *stream) {
  return cudaEventRecord((cudaEvent_t)event, (cudaStream_t)stream);
}
int epcy_cuda_event_wait(void *event, void *stream) {
  return cudaStreamWaitEvent((cudaStream_t)stream, (cudaEvent_t)event, 0);
}
int epcy_cuda_event_query(void *event, int *done) {
  const cudaError_t e = cudaEventQuery((cudaEvent_t)event);
  *done = e == cudaSuccess;
  return e == cudaErrorNotReady ? 0 : e;
}

static bool ticketed(const uint64_t *at, uint32_t ticket) {
  return (uint32_t)(__atomic_load_n(at, __ATOMIC_ACQUIRE) >> 32) == ticket;
}

int epcy_cuda_poll(const epcy_report *report, uint32_t ticket, int first_rank, int num_ranks, int64_t num_experts,
                   int64_t slice_ns, int *done) {
  const uint64_t *experts = (const uint64_t *)(report + 1);
  timespec start, now;
  clock_gettime(CLOCK_MONOTONIC, &start);
  int rank = 0;
  int64_t expert = 0;
  bool all_ok = true;
  *done = 0;
  for (int64_t turn = 1;; turn++) {
    for (; rank < num_ranks && ticketed(&report->verdict[first_rank + rank], ticket); rank++)
      all_ok &= (uint32_t)report->verdict[first_rank + rank] == EPCY_VERDICT_OK;
    if (rank == num_ranks) {
      const int64_t needed = all_ok ? num_experts : 0; // a call that failed counts nothing
      while (expert < needed && ticketed(&experts[expert], ticket)) expert++;
      if (expert == needed && (needed == 0 || ticketed(&report->num_rows, ticket))) return *done = 1, 0;
    }
    if (turn % 64 == 0) {
      clock_gettime(CLOCK_MONOTONIC, &now);
      const int64_t elapsed = (now.tv_sec - start.tv_sec) * 1000000000ll + now.tv_nsec - start.tv_nsec;
      if (elapsed > slice_ns) return 0;
      if (elapsed > 2000000) sched_yield(); // long past the usual: ranks may share this core
    }
  }
}

int epcy_cuda_load(void) {
  int error = epcy_cuda_load_dispatch();
  if (!error) error = epcy_cuda_load_dispatch_expert();
  if (!error) error = epcy_cuda_load_combine();
  return error ? error : epcy_cuda_load_combine_expert();
}

int epcy_nvshmem_unique_id(void *out) {
  static_assert(sizeof(nvshmemx_uniqueid_t) == EPCY_UNIQUE_ID_BYTES, "the size of an id");
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  const int status = nvshmemx_get_uniqueid(&id);
  memcpy(out, &id, sizeof id);
  return status;
}

// The id must stay alive until init returns: it is copied here. Without a CUDA context NVSHMEM would start only by half.
int epcy_nvshmem_init(int rank, int num_ranks, const void *given) {
  const cudaError_t no_context = cudaFree(nullptr);
  if (no_context != cudaSuccess) return no_context;
  nvshmemx_uniqueid_t id;
  memcpy(&id, given, sizeof id);
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  const int status = nvshmemx_set_attr_uniqueid_args(rank, num_ranks, &id, &attributes);
  return status ? status : nvshmemx_hostlib_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
}

int epcy_nvshmem_init_status(void) { return nvshmemx_init_status(); }
void epcy_nvshmem_version(int *major, int *minor, int *patch) { nvshmemx_vendor_get_version_info(major, minor, patch); }
void *epcy_nvshmem_align(int64_t bytes) { return nvshmem_align(EPCY_PAGE_BYTES, (size_t)bytes); }
void epcy_nvshmem_free(void *p) { nvshmem_free(p); }
void *epcy_nvshmem_ptr(const void *p, int pe) { return nvshmem_ptr(p, pe); }
void epcy_nvshmem_finalize(void) { nvshmemx_hostlib_finalize(); }
}
