// What begins and ends every call between nodes: records to everybody, and the epoch's step; calls without data; reset.
#include "epcy/low_latency.h"
#include "put_nodes.cuh"
#include "text.cuh"

namespace {

using namespace nodes;

// EPCY_NODES_PARTS blocks: this rank's record, in its own memory first.
template <typename Id>
__global__ void __launch_bounds__(kBlock)
    write_record(const __grid_constant__ epcy_nodes_call a, const __grid_constant__ Text text) {
  __shared__ unsigned long long first_bad;
  const NodeCall s(a);
  if (s.broken()) return;
  epcy_nodes_record *record = s.record(s.me);
  if (threadIdx.x == 0) first_bad = ~0ull;
  if (is_first_thread()) {
    s.notes()->start_ns = global_time_ns();
    for (int i = 0; i < EPCY_NUM_SPANS; i++) s.notes()->end_ns[i] = 0;
    record->header = a.header, record->limit = a.limit, record->num_tokens = a.num_tokens, record->parts = a.parts;
    record->num_blocks = a.num_blocks * (1 + 2 * a.wire.num_groups);
    record->y_at = (uint32_t)(a.y_offset / 128), record->weights_at = (uint32_t)(a.weights_offset / 128);
  }
  if (blockIdx.x == 0 && threadIdx.x < EPCY_CUDA_TEXT_BYTES) record->text[threadIdx.x] = text.bytes[threadIdx.x];
  __syncthreads();
  const int64_t lanes = (int64_t)a.num_tokens * s.K(), step = (int64_t)gridDim.x * kBlock;
  int32_t *ids = s.ids(s.me);
  float *weights = (float *)((char *)ids + (a.parts & EPCY_NODES_IDS ? NodeCall::array_bytes(a.num_tokens, s.K()) : 0));
  for (int64_t q = (int64_t)blockIdx.x * kBlock + threadIdx.x; q < lanes; q += step) {
    if (a.parts & EPCY_NODES_IDS) {
      const int64_t id = (int64_t)((const Id *)a.topk_idx)[q];
      const bool names_one = id >= 0 && id < s.E();
      if (!names_one && id != -1) atomicMin(&first_bad, (unsigned long long)q);
      ids[q] = names_one ? (int32_t)id : -1;
      a.lane_ids_out[q] = names_one ? id : -1;
    }
    if (a.parts & EPCY_NODES_WEIGHTS) weights[q] = a.topk_weights[q];
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const bool bad = first_bad != ~0ull;
    record->bad[blockIdx.x][0] = bad ? (int64_t)first_bad : -1;
    record->bad[blockIdx.x][1] = bad ? (int64_t)((const Id *)a.topk_idx)[first_bad] : 0;
  }
  s.note(EPCY_SPAN_COUNT);
}

// A block for each rank.
__global__ void __launch_bounds__(kBlock) send_record(const __grid_constant__ epcy_nodes_call a) {
  const NodeCall s(a);
  const int r = blockIdx.x;
  if (__syncthreads_or(s.broken())) return;
  const int64_t each = NodeCall::array_bytes(a.num_tokens, s.K());
  const int64_t bytes =
      EPCY_NODES_RECORD_BYTES + ((a.parts & EPCY_NODES_IDS) != 0) * each + ((a.parts & EPCY_NODES_WEIGHTS) != 0) * each;
  const char *from = s.own() + s.record_at(s.me);
  if (threadIdx.x ==
      0) { // for waits of low-latency calls, which look whether this rank is in another one: elsewhere.cuh
    uint64_t *header = s.header(s.me, s.me);
    if (s.is_near(r)) store_word(s.header(r, s.me), s.word(a.header));
    else put_word((uint64_t *)(a.map.name[r] + ((char *)header - s.own())), s.word(a.header), a.map.pe[r]);
  }
  if (!s.is_near(r)) {
    char *const name = a.map.name[r];
    put_block(name + s.record_at(s.me), from, bytes, (uint64_t *)(name + s.announced_at(s.me)), s.word(1), a.map.pe[r]);
    if (threadIdx.x == 0) add_to(&s.notes()->node_bytes[1], bytes);
    return;
  }
  char *to = s.p.base[r] + s.record_at(s.me);
  for (int64_t i = threadIdx.x * 16; r != s.me && i < bytes; i += kBlock * 16)
    *(uint4 *)(to + i) = __ldcg((const uint4 *)(from + i));
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    store_word_release((uint64_t *)(s.p.base[r] + s.announced_at(s.me)), s.word(1));
  }
}

// One block.
__global__ void __launch_bounds__(256) await_records(const __grid_constant__ epcy_nodes_call a) {
  const NodeCall s(a);
  const int r = threadIdx.x;
  if (!__syncthreads_or(s.broken()) && r < s.num_ranks) {
    const uint64_t since = global_time_ns();
    s.wait_exact(s.announced_at(r), s.word(1), EPCY_CUDA_HEADERS, r);
    stamp_wait(s.p, r, since);
  }
  __syncthreads();
  s.note(EPCY_SPAN_EXCHANGE);
  // Without rows a rank that comes too late would find all records and go on alone: everybody says that he has seen all.
  if (EPCY_HEADER_OP(a.header) <= EPCY_STEP_COMBINE || s.judge() != EPCY_VERDICT_OK || r >= s.num_ranks) return;
  constexpr int kSeen = 2;
  uint64_t *mine = s.mark(s.me, s.me, kSeen);
  if (s.is_near(r)) store_word_release(s.mark(r, s.me, kSeen), s.word(1));
  else put_word((uint64_t *)(a.map.name[r] + ((char *)mine - s.own())), s.word(1), a.map.pe[r]);
  bool ok = true;
  s.wait_for(s.mark(s.me, r, kSeen), 1, EPCY_CUDA_COMPLETION, r, &ok);
}

// One block, the last kernel of a call. Without rows to place, it is here that the host hears of it.
__global__ void __launch_bounds__(256) end_call(const __grid_constant__ epcy_nodes_call a) {
  const NodeCall s(a);
  const bool is_step = EPCY_HEADER_OP(a.header) > EPCY_STEP_COMBINE || (a.header & EPCY_HEADER_REFUSED);
  const int verdict = s.judge();
  const bool refuses = a.header & EPCY_HEADER_REFUSED; // and knows why
  if (verdict == EPCY_VERDICT_BROKEN) {
    if (threadIdx.x < 32) s.tell_far_ranks();
    if ((int)threadIdx.x < s.num_ranks && (s.p.ticket || !refuses)) s.tell_verdict(threadIdx.x, verdict);
    return;
  }
  for (int b = threadIdx.x; b < EPCY_MAX_BLOCKS; b += 256) s.local()->epoch[b] = s.epoch;
  if (threadIdx.x == 0) put_fence(); // nothing of a later call overtakes what is under way of this one
  // A dispatch that places rows has told the host long before.
  if (threadIdx.x == 0 && !s.places_rows() && (s.p.ticket || !(is_step && refuses))) s.tell_verdict(s.me, verdict);
  if (threadIdx.x < 32) {
    const epcy_nodes_local *n = s.notes();
    if (threadIdx.x == 0) {
      stamps().start_ns = n->start_ns;
      for (int i = 0; i < EPCY_NUM_SPANS; i++) stamps().end_ns[i] = n->end_ns[i];
    }
    __syncwarp();
    stamp_end(counters_of(s.p), EPCY_STAMP_STEP, s.epoch, s.p.operation, EPCY_SPAN_WAIT, is_first_thread());
  }
}

__global__ void __launch_bounds__(32) leave(const __grid_constant__ epcy_nodes_call a) {
  const NodeCall s(a);
  if ((int)threadIdx.x < s.num_ranks && s.is_near(threadIdx.x)) *(volatile uint32_t *)s.left(threadIdx.x, s.me) = 1;
  s.tell_far_ranks();
  __threadfence_system();
}

// As reset_all of step.cu, with words that are put to ranks of other nodes.
__global__ void __launch_bounds__(32) reset_ranks(const __grid_constant__ epcy_nodes_call a,
                                                  const __grid_constant__ epcy_low_latency_wire wire, uint32_t round) {
  const epcy_peers &p = a.peers;
  const int R = (int)p.shape.num_ranks, r = threadIdx.x, me = p.rank;
  char *own = p.base[me];
  epcy_local *local = (epcy_local *)(own + p.control.local);
  epcy_low_latency_local *low = (epcy_low_latency_local *)(own + wire.local);
  uint64_t *words = (uint64_t *)(own + p.control.resets);
  uint32_t most = local->epoch[0];
  if (wire.bytes) most = max(most, max(low->epoch[0][0], low->epoch[1][0]));
  const bool again = (uint32_t)(load_word(words + me) >> 32) == round;
  const bool settled = again && (uint32_t)(load_word(words + R + me) >> 32) == round;
  const uint32_t mine = again ? (uint32_t)load_word(words + me) : most;
  const bool meets = r < R && !(local->masked >> r & 1); // a lane a rank that takes part
  if (r == 0) put_fence();                               // the words that say that this rank has left come before
  __syncwarp();
  bool ok = true;
  for (int half = 0; half < 2 && ok; half++) {
    uint64_t seen = 0;
    if (r < R) {
      const uint64_t said = (uint64_t)round << 32 | mine;
      const int at = half * R + me;
      if (a.map.near_ranks >> r & 1) store_word_release((uint64_t *)(p.base[r] + p.control.resets) + at, said);
      else put_word((uint64_t *)(a.map.name[r] + p.control.resets) + at, said, a.map.pe[r]);
    }
    if (meets) {
      const uint64_t start = global_time_ns();
      while ((int32_t)((uint32_t)((seen = load_word_acquire(words + half * R + r)) >> 32) - round) < 0 && ok)
        ok = global_time_ns() - start < (uint64_t)p.timeout_ns;
      if (!ok) {
        p.report->phase = EPCY_CUDA_RESET, p.report->peer = r, p.report->epoch = mine;
        p.report->expected = (uint64_t)round << 32, p.report->seen = seen;
        p.report->timeout_ns = p.timeout_ns, p.report->expired = 1;
      }
    }
    ok = __all_sync(~0u, ok);
    if (!ok || half) continue;
    if (settled) {
      if (r == 0) local->broken = 0;
    } else { // the furthest, modulo 2^32
      const uint32_t epoch =
          mine + 2 + (uint32_t)__reduce_max_sync(~0u, meets ? (int32_t)((uint32_t)seen - mine) : INT32_MIN);
      for (int b = r; b < EPCY_MAX_BLOCKS; b += 32) local->epoch[b] = epoch;
      if (r == 0) local->broken = 0, local->blocks_met = 0;
      if (meets) ((uint32_t *)(own + p.control.left))[r] = 0; // all have come
      if (wire.bytes) {
        for (int i = r; i < 2 * EPCY_LOW_LATENCY_MAX_BLOCKS; i += 32) (&low->epoch[0][0])[i] = epoch;
        for (int i = r; i < 2 * R; i += 32) store_word((uint64_t *)(own + wire.acks) + i, epoch);
        if (r < 4) (&low->held[0][0])[r] = 0;
        if (r < 2) low->blocks_done[r] = 0;
      }
    }
    __threadfence_system();
    __syncwarp();
  }
  __threadfence_system();
  if (r == 0)
    *(volatile uint64_t *)&p.report->verdict[me] =
        (uint64_t)p.ticket << 32 | (ok ? EPCY_VERDICT_OK : EPCY_VERDICT_BROKEN);
}

} // namespace

extern "C" int epcy_nodes_launch_record(const epcy_nodes_call *a, const char *text, void *stream) {
  const int error = a->is_int64
                        ? launch_apart(write_record<int64_t>, EPCY_NODES_PARTS, kBlock, stream, *a, text_of(text))
                        : launch_apart(write_record<int32_t>, EPCY_NODES_PARTS, kBlock, stream, *a, text_of(text));
  return error ? error : launch_apart(send_record, (int)a->peers.shape.num_ranks, kBlock, stream, *a);
}
extern "C" int epcy_nodes_launch_await(const epcy_nodes_call *a, void *stream) {
  return launch_apart(await_records, 1, 256, stream, *a);
}
extern "C" int epcy_nodes_launch_end(const epcy_nodes_call *a, void *stream) {
  return launch_apart(end_call, 1, 256, stream, *a);
}
extern "C" int epcy_nodes_launch_leave(const epcy_nodes_call *a, void *stream) {
  return launch_apart(leave, 1, 32, stream, *a);
}
extern "C" int epcy_nodes_launch_reset(const epcy_nodes_call *a, const void *wire, uint32_t round, void *stream) {
  return launch_apart(reset_ranks, 1, 32, stream, *a, *(const epcy_low_latency_wire *)wire, round);
}

int epcy_nodes_load_record() {
  cudaFuncAttributes ignored;
  cudaError_t e = cudaFuncGetAttributes(&ignored, write_record<int64_t>);
  if (e == cudaSuccess) e = cudaFuncGetAttributes(&ignored, write_record<int32_t>);
  for (auto kernel : {send_record, await_records, end_call, leave})
    if (e == cudaSuccess) e = cudaFuncGetAttributes(&ignored, kernel);
  return e == cudaSuccess ? cudaFuncGetAttributes(&ignored, reset_ranks) : e;
}
