// A rank that refuses a low-latency call takes part in it all the same: its epoch steps, and its header frees those who
// wait for its data.
#include "low_latency.cuh"
#include "text.cuh"

namespace {

__global__ void __launch_bounds__(kThreads, 1)
    refuse(const __grid_constant__ epcy_low_latency_call call, int kind, const __grid_constant__ Text text) {
  LowLatency s(call, kind, nullptr);
  const uint2 state = load_local_pair(call.broken); // broken, masked
  if (__syncthreads_or(state.x)) return;
  __shared__ uint32_t missing;
  const bool first_warp = threadIdx.x < 32;
  bool ok = true;
  if (first_warp) {
    const uint64_t acks = s.look_for_acks();
    s.acknowledge(s.look_for_held());
    s.peers &= ~state.y;
    ok = s.wait_for_acks(acks);
    if (s.lane == 0) missing = s.missing();
  }
  if (__syncthreads_or(!ok)) return;
  s.peers &= ~missing;
  for (int i = threadIdx.x; i < call.num_ranks * EPCY_CUDA_TEXT_BYTES; i += kThreads)
    if (s.takes_part(i / EPCY_CUDA_TEXT_BYTES))
      s.text(i / EPCY_CUDA_TEXT_BYTES, call.rank)[i % EPCY_CUDA_TEXT_BYTES] = text.bytes[i % EPCY_CUDA_TEXT_BYTES];
  if (kind == EPCY_LOW_LATENCY_DISPATCH) { // counts are waited for together with headers, so they come too
    const int L = (int)call.num_local.by;
    for (int i = threadIdx.x; i < call.num_ranks * L; i += kThreads)
      if (s.takes_part(i / L)) store_word(s.counts(i / L, call.rank) + i % L, s.word(0));
  }
  __threadfence_system(); // the text before the word that says that it is there
  __syncthreads();
  if (first_warp) s.announce(0, call.header);
  // Nothing is received here, and nothing is kept for a hook: as if this had been received.
  s.leave(EPCY_LOW_LATENCY_SEND | EPCY_LOW_LATENCY_RECEIVE, nullptr);
}

} // namespace

extern "C" int epcy_cuda_launch_low_latency_refusal(const epcy_peers *peers, const epcy_low_latency_wire *wire,
                                                    int kind, uint32_t header, const char *text, void *stream) {
  epcy_low_latency_call call = {};
  call.peers = *peers, call.wire = *wire, call.header = header | EPCY_HEADER_REFUSED;
  epcy_low_latency_constants(&call);
  return launch_apart(refuse, 1, kThreads, stream, call, kind, text_of(text));
}
