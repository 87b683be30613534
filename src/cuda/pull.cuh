// Combine: every rank pulls rows of its tokens from where other ranks made them ready, and sums them in rank order.
//
// A block is two pipelines, each with every second of its tokens: a warp loads rows into a ring of stages (bulk copies),
// seven others add them up in registers. A token's rows come in rank order, so the sum does too. A row larger than a stage
// is summed piece by piece. One pipeline alone would spend its time on the cost of each row, not on its bytes.
#pragma once
#include "launch.cuh"
#include "numeric.cuh"
#include "step.cuh"

constexpr int kPipelines = 2, kAdders = 224, kThreads = kPipelines * (32 + kAdders);
constexpr int kVectors = 4, kStageBytes = kAdders * kVectors * 16, kStages = 5;

// What lies in a stage: the loader writes that before the stage is full, and the adders read it at once. The last stage
// of all has no token.
struct alignas(16) Stage {
  int token, piece, which, unused;
};
enum { kFirst = 1, kLast = 2, kEmpty = 4 }; // of a token's rows

// A pipeline's way round its ring.
struct Place {
  int stage = 0;
  uint32_t round = 0;
  EPCY_DEVICE void next() {
    if (++stage == kStages) stage = 0, round++;
  }
};

#ifdef EPCY_HAS_BULK
// The ranks that hold a row of this token, as bits; a whole warp.
EPCY_DEVICE unsigned holders(const Step &s, const epcy_cuda_combine &a, int token, int *row) {
  const int lane = threadIdx.x & 31;
  *row = lane < s.num_ranks && token < a.num_tokens ? a.pos[(int64_t)token * s.num_ranks + lane] : -1;
  return __ballot_sync(~0u, *row >= 0);
}
#endif

template <int Dtype> EPCY_DEVICE void add_bias(const epcy_cuda_combine &a, int token, int64_t at, float *acc) {
#pragma unroll 1
  for (int b = 0; b < 2; b++)
    if (a.bias[b]) Vector<Dtype>::add(acc, *(const uint4 *)(a.bias[b] + (int64_t)token * a.row_bytes + at));
}

// The adders: everything a token's sum is made of passes through these registers.
template <int Dtype> struct Sum {
  float acc[kVectors][Vector<Dtype>::kElements];
  EPCY_DEVICE void begin(const epcy_cuda_combine &a, int token, int64_t piece_at, int bytes, int me) {
#pragma unroll
    for (int v = 0; v < kVectors; v++) {
#pragma unroll
      for (int i = 0; i < Vector<Dtype>::kElements; i++) acc[v][i] = 0.0f;
      const int at = (v * kAdders + me) * 16;
      if (at < bytes) add_bias<Dtype>(a, token, piece_at + at, acc[v]);
    }
  }
  EPCY_DEVICE void add(const char *row, int bytes, int me) {
#pragma unroll
    for (int v = 0; v < kVectors; v++) {
      const int at = (v * kAdders + me) * 16;
      if (at < bytes) Vector<Dtype>::add(acc[v], *(const uint4 *)(row + at));
    }
  }
  EPCY_DEVICE void end(char *out, int bytes, int me) {
#pragma unroll
    for (int v = 0; v < kVectors; v++) {
      const int at = (v * kAdders + me) * 16;
      if (at < bytes) *(uint4 *)(out + at) = Vector<Dtype>::round(acc[v]);
    }
  }
};

// Where rows lie, by rank.
struct Rows {
  const char *at[EPCY_MAX_RANKS];
  int64_t stride[EPCY_MAX_RANKS];
};

// One pipeline's place in shared memory.
struct Pipeline {
  uint64_t full[kStages], empty[kStages];
  Stage stage[kStages];
};

template <int Dtype>
EPCY_DEVICE void pull(const Step &s, const epcy_cuda_combine &a, char *rings, Pipeline *pipelines, const Rows &y) {
  const int mine = threadIdx.x / (32 + kAdders), tid = threadIdx.x % (32 + kAdders);
  const int begin = blockIdx.x * kPipelines + mine, step = gridDim.x * kPipelines;
#ifdef EPCY_HAS_BULK
  Pipeline &p = pipelines[mine];
  char *ring = rings + (int64_t)mine * kStages * kStageBytes;
  const int lane = tid & 31;
  if (tid < 32) { // the loader
    proxy_fence();
    Place place;
    int row, next_row;
    uint64_t moved = 0; // bytes from other ranks, for the statistics
    unsigned who = holders(s, a, begin, &row);
    auto free_stage = [&] {
      if (place.round) barrier_wait(p.empty + place.stage, (place.round - 1) & 1);
      return place.stage;
    };
#pragma unroll 1
    for (int token = begin; token < a.num_tokens; token += step, row = next_row) {
      const unsigned next = holders(s, a, token + step, &next_row); // its latency hides behind this token
#pragma unroll 1
      for (int64_t at = 0, piece = 0; at < a.row_bytes; at += kStageBytes, piece++) {
        const uint32_t bytes = (uint32_t)(a.row_bytes - at < kStageBytes ? a.row_bytes - at : kStageBytes);
        unsigned left = who;
        do {
          const int r = left ? __ffs(left) - 1 : 0;
          const int from = __shfl_sync(~0u, row, r);
          if (lane == 0) {
            const int st = free_stage();
            const int which = (left == who ? kFirst : 0) | ((left & (left - 1)) == 0 ? kLast : 0) | (left ? 0 : kEmpty);
            p.stage[st] = {token, (int)piece, which, 0};
            if (left) {
              moved += r == s.me ? 0 : bytes;
              barrier_expect(p.full + st, bytes);
              bulk_load(ring + (int64_t)st * kStageBytes, y.at[r] + from * y.stride[r] + at, bytes, p.full + st);
            } else {
              barrier_arrive(p.full + st);
            }
          }
          place.next();
          left &= left - 1;
        } while (left);
      }
      who = next;
    }
    if (lane == 0) { // a stage that says: no more
      const int st = free_stage();
      p.stage[st] = {-1, 0, 0, 0};
      barrier_arrive(p.full + st);
      if (moved) add_to(&counters_of(s.p)->bytes_moved, moved);
    }
    __syncwarp();
  } else {
    const int me = tid - 32;
    Sum<Dtype> sum;
#pragma unroll 1
    for (Place place;; place.next()) {
      const int st = place.stage;
      barrier_wait(p.full + st, place.round & 1);
      const Stage got = p.stage[st];
      if (got.token < 0) break;
      const int64_t at = (int64_t)got.piece * kStageBytes, rest = a.row_bytes - at;
      const int bytes = rest < kStageBytes ? (int)rest : kStageBytes;
      if (got.which & kFirst) sum.begin(a, got.token, at, bytes, me);
      if (!(got.which & kEmpty)) sum.add(ring + st * kStageBytes, bytes, me);
      __syncwarp();
      if (lane == 0) barrier_arrive(p.empty + st);
      if (got.which & kLast) sum.end(a.out + (int64_t)got.token * a.row_bytes + at, bytes, me);
    }
  }
#else
  if (tid >= kAdders) return; // the plain path: every adder loads for itself
#pragma unroll 1
  for (int token = begin; token < a.num_tokens; token += step)
#pragma unroll 1
    for (int64_t at = 0; at < a.row_bytes; at += kStageBytes) {
      const int bytes = a.row_bytes - at < kStageBytes ? (int)(a.row_bytes - at) : kStageBytes;
      Sum<Dtype> sum;
      sum.begin(a, token, at, bytes, tid);
#pragma unroll 1
      for (int r = 0; r < s.num_ranks; r++) {
        const int row = a.pos[(int64_t)token * s.num_ranks + r];
        if (row >= 0) sum.add(y.at[r] + row * y.stride[r] + at, bytes, tid);
      }
      sum.end(a.out + (int64_t)token * a.row_bytes + at, bytes, tid);
    }
#endif
}

// All threads of every block: the whole of a combine. `before` makes ready on every rank what is pulled (it may not return
// early), and may raise the verdict.
template <int Dtype, typename Before> EPCY_DEVICE void combine(const epcy_cuda_combine &a, char *rings, Before before) {
  __shared__ Pipeline pipelines[kPipelines];
  __shared__ Rows y;
  __shared__ int verdict;
  const Step s(a.peers);
  if (__syncthreads_or(s.broken())) return s.report_broken();
  if (blockIdx.x == 0)
    s.announce(a.header, (uint32_t)(a.y_offset / 128), (uint32_t)(a.weights_offset / 128), EPCY_GRID(gridDim.x, 0, 0));
  if (threadIdx.x == 0) {
    verdict = EPCY_VERDICT_OK;
#ifdef EPCY_HAS_BULK
#pragma unroll 1
    for (int i = 0; i < kPipelines * kStages; i++) {
      barrier_init(pipelines[i / kStages].full + i % kStages, 1);
      barrier_init(pipelines[i / kStages].empty + i % kStages, kAdders / 32);
    }
    barrier_init_fence();
#endif
  }
  // What the loaders read first is far: start it while the headers are on their way.
  const int first = blockIdx.x * kPipelines + threadIdx.x / (32 + kAdders);
  if (threadIdx.x % (32 + kAdders) == 0 && first < a.num_tokens) prefetch(a.pos + (int64_t)first * s.num_ranks);
  __syncthreads();
  s.gather(a.header, &verdict);
  if ((int)threadIdx.x < s.num_ranks) {
    const bool apart = a.own_rows && (int)threadIdx.x == s.me;
    y.at[threadIdx.x] = apart ? a.own_rows : a.peers.base[threadIdx.x] + (int64_t)s.header_value(threadIdx.x, 1) * 128;
    y.stride[threadIdx.x] = apart ? a.own_stride_bytes : a.row_bytes;
  }
  __syncthreads();
  if (blockIdx.x == 0 && threadIdx.x == kThreads - 1) s.report(s.me, verdict); // no loader waits for the host
  if (verdict == EPCY_VERDICT_OK) before(s, &verdict);
  stamp(EPCY_SPAN_SEND); // sums that others pull, in the expert layout
  if (verdict == EPCY_VERDICT_OK) pull<Dtype>(s, a, rings, pipelines, y);
  s.finish(&verdict);
}

template <typename Kernel>
int launch_combine(Kernel bf16, Kernel fp16, Kernel fp32, const epcy_cuda_combine *call, int num_sms, void *stream) {
  const size_t bytes = has_bulk_copies() ? (size_t)kPipelines * kStages * kStageBytes : 0;
  const Kernel kernel = call->dtype == kBf16 ? bf16 : call->dtype == kFp16 ? fp16 : fp32;
  return launch_together(kernel, num_sms, kThreads, bytes, stream, *call);
}

template <typename Kernel> int allow_combine(Kernel bf16, Kernel fp16, Kernel fp32) {
  int error = allow_shared(bf16);
  if (!error) error = allow_shared(fp16);
  return error ? error : allow_shared(fp32);
}
