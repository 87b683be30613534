// Where rows go: from everybody's ids, which came with the records, to the places of all rows that concern this rank.
//
// Each source is a block's: rows of different sources are placed by the counts of the sources before, tokens of one source
// in their order. All ranks do the same arithmetic with the same numbers.
#include "put_nodes.cuh"

namespace {

using namespace nodes;

constexpr int kPlanBlock = 512, kPlanWarps = kPlanBlock / 32;
constexpr int64_t kMostTableBytes = 160 * 1024;

// A whole warp: the sum of n over this lane and all before it.
EPCY_DEVICE int sum_up_to(int n) {
#pragma unroll 1
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, n, step);
    if ((int)(threadIdx.x & 31) >= step) n += other;
  }
  return n;
}
// The ranks that a token goes to, as bits.
EPCY_DEVICE unsigned ranks_of(const int32_t *ids, int K, int L) {
  unsigned ranks = 0;
#pragma unroll 4
  for (int k = 0; k < K; k++) {
    const int id = __ldcg(ids + k);
    if (id >= 0) ranks |= 1u << (id / L);
  }
  return ranks;
}

// A block for each source: wait for its record, keep its ids, and count. Dynamic shared memory: [E].
__global__ void __launch_bounds__(kPlanBlock) count_tokens(const __grid_constant__ epcy_nodes_call a) {
  __shared__ int tokens_to[32];
  int *lanes = (int *)dynamic_shared();
  const NodeCall s(a);
  const int from = blockIdx.x, lane = threadIdx.x & 31, R = s.num_ranks, K = s.K(), E = s.E(), L = s.L();
  bool ok = !s.broken();
  if (ok && threadIdx.x == 0) {
    const uint64_t since = global_time_ns();
    ok = s.wait_exact(s.announced_at(from), s.word(1), EPCY_CUDA_HEADERS, from);
    stamp_wait(s.p, from, since);
  }
  if (threadIdx.x < 32) tokens_to[lane] = 0;
  for (int e = threadIdx.x; e < E; e += kPlanBlock) lanes[e] = 0;
  if (__syncthreads_or(!ok)) return;
  const epcy_nodes_record *record = s.record(from);
  if (threadIdx.x < 32) { // the first bad id
    int64_t least = INT64_MAX;
    for (int i = lane; i < EPCY_NODES_PARTS; i += 32) {
      const int64_t q = __ldcg(&record->bad[i][0]);
      if (q >= 0 && q < least) least = q;
    }
    least = __reduce_min_sync(~0u, (unsigned)(least == INT64_MAX ? ~0u : (unsigned)least));
    if (lane == 0) {
      int64_t value = 0;
      const bool is_bad = least != (int64_t)~0u;
      for (int i = 0; is_bad && i < EPCY_NODES_PARTS; i++)
        if (__ldcg(&record->bad[i][0]) == least) value = __ldcg(&record->bad[i][1]);
      s.notes()->bad[from][0] = is_bad ? least : -1, s.notes()->bad[from][1] = value;
      auto *bad = &s.p.report->bad[0]; // for the host, where it does not wait
      if (is_bad && from == s.me && !(a.header & EPCY_HEADER_WAITS) && bad->epoch == 0) {
        bad->token = least / K, bad->lane = least % K, bad->value = value;
        __threadfence_system();
        *(volatile uint32_t *)&bad->epoch = s.epoch;
      }
    }
  }
  const uint32_t theirs = s.header_of(from);
  if ((theirs & EPCY_HEADER_REFUSED) || ((theirs ^ a.header) & EPCY_HEADER_COMPARED)) return;
  const int T = (int)__ldcg(&record->num_tokens);
  const int32_t *ids = s.ids(from);
  int32_t *kept = a.nodes.ids + (int64_t)from * s.M() * K;
  for (int q = threadIdx.x; q < T * K; q += kPlanBlock) {
    const int id = __ldcg(ids + q);
    kept[q] = id;
    if (id >= 0) atomicAdd(&lanes[id], 1);
  }
  int mine = 0; // tokens to rank `lane`
  for (int first = threadIdx.x & ~31; first < T; first += kPlanBlock) {
    const int t = first + lane;
    const unsigned ranks = t < T ? ranks_of(ids + (int64_t)t * K, K, L) : 0;
    for (int d = 0; d < R; d++) {
      const int n = __popc(__ballot_sync(~0u, ranks >> d & 1));
      if (lane == d) mine += n;
    }
  }
  if (mine) atomicAdd(&tokens_to[lane], mine);
  __syncthreads();
  if ((int)threadIdx.x < R) a.nodes.counts[from * R + threadIdx.x] = tokens_to[threadIdx.x];
  for (int e = threadIdx.x; e < E; e += kPlanBlock) a.nodes.lanes[(int64_t)from * E + e] = lanes[e];
  if (threadIdx.x == 0) a.nodes.tokens[from] = T;
  if (from == s.me) s.note(EPCY_SPAN_EXCHANGE, threadIdx.x == 0);
}

// What each rank receives, and how much of it it takes: by lane. Whole warps.
struct Totals {
  int rows, limit;
  bool over; // it waits, and there is no room
  EPCY_DEVICE Totals(const NodeCall &s, int rows, int verdict) : rows(rows), limit(0), over(false) {
    const int d = threadIdx.x & 31;
    if (d >= s.num_ranks || verdict != EPCY_VERDICT_OK) return;
    limit = (int)__ldcg(&s.record(d)->limit);
    over = (s.header_of(d) & EPCY_HEADER_WAITS) && rows > limit;
    if (over) limit = 0;
  }
};
EPCY_DEVICE int tokens_to(const NodeCall &s, int below) { // from the ranks below, to rank `lane`
  int n = 0;
  for (int q = 0; q < below; q++)
    if ((int)(threadIdx.x & 31) < s.num_ranks) n += __ldcg(s.a.nodes.counts + q * s.num_ranks + (threadIdx.x & 31));
  return n;
}

// One thread: token t of a source has its (first) row at rank d there.
struct Places {
  const NodeCall &s;
  int from, feed, targets;
  EPCY_DEVICE Places(const NodeCall &s, int from) : s(s), from(from), feed(-1) {
    for (int g = 0; g < s.a.wire.num_groups; g++)
      if (s.a.map.peer[g] == from) feed = g;
    targets = s.a.map.hierarchical ? s.a.map.num_near : 1;
  }
  EPCY_DEVICE void set(int t, int d, int row) const {
    const epcy_nodes_call &a = s.a;
    if (d == s.me) a.nodes.first[(int64_t)from * s.M() + t] = row;
    if (from == s.me) a.routing.pos[(int64_t)t * s.num_ranks + d] = row;
    if (feed < 0 || !(a.map.hierarchical ? s.is_near(d) : d == s.me)) return;
    const int target = a.map.hierarchical ? __popc(a.map.near_ranks & ((1u << d) - 1)) : 0;
    a.nodes.feed_rows[((int64_t)feed * s.M() + t) * targets + target] = row;
  }
};

// All threads: rows of a source's tokens in the rank layout. A lane a destination, a warp a piece of the tokens.
EPCY_DEVICE void place_tokens(const NodeCall &s, int from, int verdict) {
  __shared__ int before[kPlanWarps][32];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, R = s.num_ranks, K = s.K(), L = s.L();
  const Totals totals(s, tokens_to(s, R), verdict);
  const int base = tokens_to(s, from), T = verdict == EPCY_VERDICT_OK ? __ldcg(s.a.nodes.tokens + from) : 0;
  const int32_t *ids = s.a.nodes.ids + (int64_t)from * s.M() * K;
  const int begin = part_of(T, warp, kPlanWarps), end = part_of(T, warp + 1, kPlanWarps);
  auto walk = [&](auto each) {
    for (int first = begin; first < end; first += 32) {
      const unsigned mine = first + lane < end ? ranks_of(ids + (int64_t)(first + lane) * K, K, L) : 0;
      for (int i = 0; i < 32 && first + i < end; i++) each(first + i, __shfl_sync(~0u, mine, i) >> lane & 1);
    }
  };
  int run = 0;
  walk([&](int, unsigned goes) { run += goes; });
  before[warp][lane] = run;
  __syncthreads();
  run = base;
  for (int w = 0; w < warp; w++) run += before[w][lane];
  const Places places(s, from);
  walk([&](int t, unsigned goes) {
    if (lane < R) places.set(t, lane, goes && run < totals.limit ? run : -1);
    run += goes;
  });
}

// Warps in turn: where the group of each expert begins at its rank, into `start`; each rank's rows, into `rows`.
EPCY_DEVICE void begin_groups(const NodeCall &s, int from, int *start, int *rows) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, R = s.num_ranks, E = s.E(), L = s.L();
  for (int d = warp; d < R; d += kPlanWarps) {
    int run = 0;
    for (int first = 0; first < L; first += 32) {
      const int e = d * L + first + lane;
      int all = 0, earlier = 0;
      for (int q = 0; q < R && first + lane < L; q++) {
        const int n = __ldcg(s.a.nodes.lanes + (int64_t)q * E + e);
        all += n, earlier += q < from ? n : 0;
      }
      const int padded = (int)epcy_padded(all, s.a.alignment), upto = sum_up_to(padded);
      if (first + lane < L) start[e] = run + upto - padded + earlier;
      run += __shfl_sync(~0u, upto, 31);
    }
    if (lane == 0) rows[d] = run;
  }
}

// All threads: rows of a source's lanes in the expert layout. `table`: [1 + segments][E].
EPCY_DEVICE void place_lanes(const NodeCall &s, int from, int verdict, int *table, int segments) {
  __shared__ int rows[32], limits[32];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, R = s.num_ranks, K = s.K(), E = s.E(), L = s.L();
  int *start = table, *mine = table + (int64_t)(1 + warp) * E;
  const int T = verdict == EPCY_VERDICT_OK ? __ldcg(s.a.nodes.tokens + from) : 0;
  const int32_t *ids = s.a.nodes.ids + (int64_t)from * s.M() * K;
  int32_t *lane_rows = s.a.nodes.lane_rows + (int64_t)from * s.M() * K;
  if (T) begin_groups(s, from, start, rows);
  for (int q = threadIdx.x; q < segments * E; q += kPlanBlock) table[E + q] = 0;
  __syncthreads();
  if (warp == 0) {
    const Totals totals(s, T && lane < R ? rows[lane] : 0, verdict);
    limits[lane] = totals.limit;
  }
  const bool works = warp < segments;
  const int begin = works ? part_of(T, warp, segments) * K : 0, end = works ? part_of(T, warp + 1, segments) * K : 0;
  for (int q = begin + lane; q < end; q += 32) {
    const int id = __ldcg(ids + q);
    if (id >= 0) atomicAdd(&mine[id], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < E; e += kPlanBlock) {
    int run = start[e];
    for (int w = 0; w < segments; w++) {
      const int n = table[(int64_t)(1 + w) * E + e];
      table[(int64_t)(1 + w) * E + e] = run;
      run += n;
    }
  }
  __syncthreads();
  for (int first = begin; first < end; first += 32) {
    const int q = first + lane, id = q < end ? __ldcg(ids + q) : -1;
    const unsigned same = __match_any_sync(~0u, id);
    const int at = id >= 0 ? mine[id] : 0;
    __syncwarp();
    if (q < end) {
      const int row = at + __popc(same & ((1u << lane) - 1));
      lane_rows[q] = id >= 0 && row < limits[id / L] ? row : -1;
      if (id >= 0 && lane == __ffs(same) - 1) mine[id] = at + __popc(same);
    }
    __syncwarp();
  }
  __syncthreads();
  const Places places(s, from);
  for (int t = threadIdx.x; t < T; t += kPlanBlock) {
    for (int d = 0; d < R; d++) places.set(t, d, -1);
    unsigned seen = 0;
    for (int k = 0; k < K; k++) {
      const int row = __ldcg(lane_rows + (int64_t)t * K + k);
      if (from == s.me) s.a.routing.lane_row[(int64_t)t * K + k] = row;
      if (row < 0) continue;
      const int d = __ldcg(ids + (int64_t)t * K + k) / L;
      if (!(seen >> d & 1)) places.set(t, d, row);
      seen |= 1u << d;
    }
  }
}

// All threads of one block: what comes to this rank, for the handle, the host and the statistics. `table`: [E].
EPCY_DEVICE void conclude(const NodeCall &s, int verdict, int *table) {
  __shared__ int rows[32];
  const epcy_nodes_call &a = s.a;
  const int lane = threadIdx.x & 31, R = s.num_ranks, L = s.L(), E = s.E();
  const bool good = verdict == EPCY_VERDICT_OK;
  epcy_report *report = s.p.report;
  epcy_counters *counters = counters_of(s.p);
  if (good && s.by_expert()) begin_groups(s, 0, table, rows);
  __syncthreads();
  for (int e = threadIdx.x; e < L; e += kPlanBlock) {
    int sum = 0;
    for (int q = 0; good && q < R; q++) sum += __ldcg(a.nodes.lanes + (int64_t)q * E + s.me * L + e);
    a.routing.experts[e] = sum;
    if (s.by_expert()) a.routing.offsets[e] = good ? table[s.me * L + e] : 0;
    if (good) add_to((uint64_t *)(counters + 1) + e, sum);
    if (s.p.ticket) s.tell((uint64_t *)(report + 1) + e, sum);
  }
  for (int q = threadIdx.x; q < R * EPCY_MAX_CHUNKS; q += kPlanBlock) {
    const int r = q / EPCY_MAX_CHUNKS;
    const bool first = good && q % EPCY_MAX_CHUNKS == 0;
    const int to = first ? __ldcg(a.nodes.counts + s.me * R + r) : 0;
    const int came = first ? __ldcg(a.nodes.counts + r * R + s.me) : 0;
    a.routing.chunk_count[q] = to, a.routing.recv_count[q] = came;
  }
  if (threadIdx.x >= 32) return;
  const int tokens = good ? tokens_to(s, R) : 0, base = good ? tokens_to(s, s.me) : 0;
  const Totals totals(s, !good ? 0 : s.by_expert() ? (lane < R ? rows[lane] : 0) : tokens, verdict);
  if (lane < R)
    for (int c = 0; c < EPCY_MAX_CHUNKS; c++) a.routing.chunk_base[lane * EPCY_MAX_CHUNKS + c] = base;
  if (lane == s.me) {
    a.routing.num_recv[0] = totals.rows, a.routing.num_recv[1] = tokens;
    if (s.by_expert()) a.routing.offsets[L] = totals.rows;
    if (s.p.ticket) {
      report->own_base = base, report->own_count = good ? __ldcg(a.nodes.counts + s.me * R + s.me) : 0;
      s.tell(&report->num_rows, (uint32_t)totals.rows);
    } else if (totals.rows > (int)a.limit) {
      report->late_rows = totals.rows, report->late_limit = a.limit;
    }
    if (good)
      atomicMax((unsigned long long *)&counters->most_rows[0][EPCY_HEADER_AREA(a.header)],
                (unsigned long long)totals.rows);
  }
  if (totals.over && !s.p.ticket)
    report->late_rank = lane, report->late_rows = totals.rows, report->late_limit = __ldcg(&s.record(lane)->limit);
  __syncwarp();
  if (lane < R) s.tell_verdict(lane, !good ? verdict : totals.over ? EPCY_VERDICT_OVERFLOW : EPCY_VERDICT_OK);
}

__global__ void __launch_bounds__(kPlanBlock) place(const __grid_constant__ epcy_nodes_call a, int segments) {
  int *table = (int *)dynamic_shared();
  const NodeCall s(a);
  const int verdict = s.judge(), from = blockIdx.x;
  if (from == s.num_ranks) return conclude(s, verdict, table);
  if (s.by_expert()) place_lanes(s, from, verdict, table, segments);
  else place_tokens(s, from, verdict);
  if (from != s.me || verdict == EPCY_VERDICT_OK) return;
  for (int q = threadIdx.x; q < a.num_tokens * s.num_ranks; q += kPlanBlock) a.routing.pos[q] = -1;
}

// A block for each group, and one for each rank that feeds this one; a warp a channel.
__global__ void __launch_bounds__(kPlanBlock) list_messages(const __grid_constant__ epcy_nodes_call a) {
  const NodeCall s(a);
  const int G = a.wire.num_groups, group = blockIdx.x % G, lane = threadIdx.x & 31, channels = a.wire.num_channels;
  const bool feeds = (int)blockIdx.x >= G;
  const int targets = a.map.hierarchical ? a.map.num_near : 1;
  const bool good = s.judge() == EPCY_VERDICT_OK;
  const int T = !good ? 0 : feeds ? __ldcg(a.nodes.tokens + a.map.peer[group]) : a.num_tokens;
  const int64_t at = (int64_t)group * s.M();
  for (int c = threadIdx.x >> 5; c < channels; c += kPlanWarps) {
    const int begin = part_of(T, c, channels), end = part_of(T, c + 1, channels);
    int run = 0;
    for (int first = begin; first < end; first += 32) {
      const int t = first + lane;
      bool goes = false;
      if (t < end && feeds)
        for (int i = 0; i < targets; i++) goes |= __ldcg(a.nodes.feed_rows + (at + t) * targets + i) >= 0;
      if (t < end && !feeds)
        for (unsigned left = a.map.members[group]; left; left &= left - 1)
          goes |= __ldcg(a.routing.pos + (int64_t)t * s.num_ranks + __ffs(left) - 1) >= 0;
      const unsigned all = __ballot_sync(~0u, goes);
      const int place = run + __popc(all & ((1u << lane) - 1));
      if (goes) (feeds ? a.nodes.feed_list : a.nodes.own_list)[at + begin + place] = t;
      if (t < end && !feeds) a.nodes.own_order[at + t] = goes ? place : -1;
      run += __popc(all);
    }
    if (lane == 0) (feeds ? a.nodes.feed_count : a.nodes.own_count)[group * channels + c] = run;
  }
}

} // namespace

extern "C" int epcy_nodes_launch_plan(const epcy_nodes_call *a, void *stream) {
  const int R = (int)a->peers.shape.num_ranks;
  const int64_t E_bytes = a->peers.shape.num_experts * 4;
  int64_t segments = kMostTableBytes / E_bytes - 1;
  segments = segments > kPlanWarps ? kPlanWarps : segments < 1 ? 1 : segments;
  const bool by_expert = EPCY_HEADER_LAYOUT(a->header);
  int error = launch_together(count_tokens, R, kPlanBlock, (size_t)E_bytes, stream, *a);
  if (!error)
    error = launch_together(place, R + 1, kPlanBlock, by_expert ? (size_t)((1 + segments) * E_bytes) : 0, stream, *a,
                            (int)segments);
  return error ? error : launch_apart(list_messages, 2 * a->wire.num_groups, kPlanBlock, stream, *a);
}

int epcy_nodes_load_plan() {
  cudaFuncAttributes ignored;
  int error = allow_shared(count_tokens);
  if (!error) error = allow_shared(place);
  return error ? error : cudaFuncGetAttributes(&ignored, list_messages);
}
