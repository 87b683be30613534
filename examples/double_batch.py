"""Decoding with two micro-batches: dispatch and combine of one are under way while the other one's products run.

    mpiexec -n 2 python -m mpi4py examples/double_batch.py --backend nvshmem --trace trace.json

Every layer is a dense product (in a model: attention and what else a token does alone), then the routed experts:

    x = combine(experts(dispatch(x @ dense)))

With ``return_recv_hook=True`` a call only sends. Its hook receives, and is called just before the data are needed.
Between the two no kernel of epcy runs, so whatever runs there has the whole GPU:

    a: dense, send           | receive, experts, send      |
    b:            dense, send|                     receive, experts, send     and a's next dense, ...

Two calls of each kind are unreceived at a time, as many as a Buffer allows. Both orders of the work give the same
bits, which is checked. What is hidden is measured: (in sequence - overlapped) / communication, the latter being the
time of the calls of a sequence without any product between them.

On nvshmem times are those of CUDA events on one stream, in float16; a kernel that waits goes first, so that the host
has launched everything before the clock starts, as in a CUDA graph, if the host is fast enough for that. On the host
backend the same program runs in float32. A send there writes the rows, a hook copies or sums them: both are work of
this rank, and what can be hidden is the waiting for ranks that come later, as far as the ranks really run at once.
"""

import argparse
import time
from functools import partial

import numpy as np
from mpi4py import MPI
from timeline import Timeline, write_trace

import epcy
from epcy import backends

COMM = MPI.COMM_WORLD
WARMUP = 3
# tokens of a micro-batch, H, inner width of an expert, dtype
DEFAULTS = {"nvshmem": (128, 7168, 512, "float16"), "host": (16, 512, 128, "float32")}

HOLD = """
extern "C" __global__ void hold(unsigned long long ns) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  while (now - start < ns);
}
"""


class MicroBatch:
    """A micro-batch of this rank: its tokens, its routing in every layer, and room for what a layer makes of them."""

    def __init__(self, name, buf, draw, num_layers):
        options, xp = buf.options, buf.xp
        tokens, hidden = options["num_max_tokens_per_rank"], options["hidden"]
        self.name, self.tokens = name, draw(tokens, hidden)
        shape = (num_layers, tokens, options["num_experts"])
        scores = draw.rng.random(shape, np.float32)
        self.topk_idx = xp.asarray(scores.argsort(2)[:, :, : options["num_topk"]])
        self.topk_weights = xp.asarray(draw.rng.random(self.topk_idx.shape, np.float32) / options["num_topk"])
        self.h, self.sums = xp.empty_like(self.tokens), xp.empty_like(self.tokens)
        self.x = self.recv_x = self.handle = self.hook = self.y = None


class Draw:
    """Values of the Buffer's dtype, scaled so that products keep their size."""

    def __init__(self, xp, dtype, seed):
        self.xp, self.dtype, self.rng = xp, dtype, np.random.default_rng(seed)

    def __call__(self, *shape):
        values = self.rng.standard_normal(shape, np.float32) * np.float32(shape[-2] ** -0.5)
        return self.xp.asarray(values.astype(self.dtype))


class Decoder:
    """The layers on one rank, and the two orders of their work."""

    def __init__(self, buf, num_layers, inner):
        options, local = buf.options, buf.num_local_experts
        hidden, slots = options["hidden"], buf.size * options["num_max_low_latency_tokens_per_rank"]
        draw, everyones = Draw(buf.xp, options["dtype"], [buf.rank, 1]), Draw(buf.xp, options["dtype"], 0)
        self.buf, self.xp = buf, buf.xp
        self.dense = [everyones(hidden, hidden) for _ in range(num_layers)]
        self.w1 = [draw(local, hidden, inner) for _ in range(num_layers)]
        self.w2 = [draw(local, inner, hidden) for _ in range(num_layers)]
        self.inner = self.xp.empty((local, slots, inner), options["dtype"])
        self.batches = [MicroBatch(name, buf, draw, num_layers) for name in "ab"]
        self.timeline = Timeline(self.xp)

    def part(self, name, batch):
        return self.timeline.part(name, f"micro-batch {batch.name}")

    # ---- the parts of a layer

    def multiply(self, layer, batch):
        with self.part("dense", batch):
            self.xp.matmul(batch.x, self.dense[layer], out=batch.h)

    def dispatch(self, layer, batch, only_send):
        with self.part("dispatch send" if only_send else "dispatch", batch):
            batch.recv_x, _, batch.handle, _, batch.hook = self.buf.low_latency_dispatch(
                batch.h,
                batch.topk_idx[layer],
                batch.topk_weights[layer],
                use_fp8=False,
                return_recv_hook=only_send,
            )

    def work(self, layer, batch, with_products=True):
        """Let the experts write where combine reads; they also multiply the slots that hold no row."""
        batch.y = self.buf.low_latency_combine_input(batch.handle)
        if with_products:
            with self.part("experts", batch):
                # One product after the other: CuPy's products of stacks of float16 leave the tensor cores idle.
                for x, up, h in zip(batch.recv_x, self.w1[layer], self.inner, strict=True):
                    self.xp.matmul(x, up, out=h)
                self.xp.maximum(self.inner, 0, out=self.inner)
                for h, down, y in zip(self.inner, self.w2[layer], batch.y, strict=True):
                    self.xp.matmul(h, down, out=y)

    def combine(self, batch, only_send):
        with self.part("combine send" if only_send else "combine", batch):
            batch.x, _, batch.hook = self.buf.low_latency_combine(
                batch.y,
                None,
                None,
                batch.handle,
                zero_copy=True,
                out=batch.sums,
                return_recv_hook=only_send,
            )

    def receive(self, what, batch):
        with self.part(f"{what} receive", batch):
            batch.hook()

    # ---- the orders

    def start(self):
        for batch in self.batches:
            batch.x = batch.tokens

    def in_sequence(self):
        self.start()
        for layer in range(len(self.dense)):
            for batch in self.batches:
                self.multiply(layer, batch)
                self.dispatch(layer, batch, only_send=False)
                self.work(layer, batch)
                self.combine(batch, only_send=False)

    def overlapped(self):
        self.start()
        for layer in range(len(self.dense)):
            for batch in self.batches:
                if layer:
                    self.receive("combine", batch)
                self.multiply(layer, batch)
                self.dispatch(layer, batch, only_send=True)
            for batch in self.batches:
                self.receive("dispatch", batch)
                self.work(layer, batch)
                self.combine(batch, only_send=True)
        for batch in self.batches:
            self.receive("combine", batch)

    def communication(self):
        for layer in range(len(self.dense)):
            for batch in self.batches:
                self.dispatch(layer, batch, only_send=False)
                self.work(layer, batch, with_products=False)
                self.combine(batch, only_send=False)


class Clock:
    """The time of a step, on the device where there is one."""

    def __init__(self, buf):
        self.buf, self.xp, self.lead_us = buf, buf.xp, 0.0
        self.hold = None if self.xp is np else self.xp.RawKernel(HOLD, "hold")

    def run(self, step):
        """Return microseconds of one step. Collective."""
        self.buf.barrier()
        if self.xp is np:
            begin = time.perf_counter()
            step()
            return (time.perf_counter() - begin) * 1e6
        start, stop = self.xp.cuda.Event(), self.xp.cuda.Event()
        self.hold((1,), (1,), (np.uint64(self.lead_us * 1e3),))
        begin = time.perf_counter()
        start.record()
        step()
        stop.record()
        launched_us = (time.perf_counter() - begin) * 1e6
        stop.synchronize()
        # For the next one, and as long on every rank: who is held longer keeps the others waiting.
        self.lead_us = COMM.allreduce(max(self.lead_us, 100 + 1.5 * launched_us), MPI.MAX)
        return self.xp.cuda.get_elapsed_time(start, stop) * 1e3

    def measure(self, step, num_runs):
        """Return the median over the runs of what the slowest rank took. Collective."""
        for _ in range(WARMUP):
            self.run(step)
        times = np.array([self.run(step) for _ in range(num_runs)])
        COMM.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
        return float(np.median(times))


def sums_of(decoder, step):
    step()
    return [batch.x.tobytes() for batch in decoder.batches]


def parse(argv):
    parser = argparse.ArgumentParser("double_batch.py", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--backend", choices=("host", "nvshmem"), help="what moves the tokens (epcy's choice)")
    add("--layers", type=int, default=4, help="of a step (%(default)s)")
    add("--tokens", type=int, help="of a micro-batch on a rank (128; on the host 16)")
    add("--hidden", type=int, help="elements of a token (7168; on the host 512)")
    add("--inner", type=int, help="inner width of an expert (512; on the host 128)")
    add("--experts", type=int, default=8, help="on each rank (%(default)s)")
    add("--topk", type=int, default=8, help="experts of a token (%(default)s)")
    add("--runs", type=int, default=20, help="of each measurement (%(default)s)")
    add("--trace", metavar="FILE", help="write a timeline of both orders (Chrome trace JSON)")
    args = parser.parse_args(argv)
    args.backend = backends.find(args.backend)[0]
    tokens, hidden, inner, args.dtype = DEFAULTS[args.backend]
    args.tokens, args.hidden = args.tokens or tokens, args.hidden or hidden
    args.inner = args.inner or inner
    return args


def main(argv=None):
    args = parse(argv)

    def say(text):
        if COMM.rank == 0:
            print(text, flush=True)

    say(
        f"{args.backend} backend, {COMM.size} ranks, {args.layers} layers, two micro-batches of {args.tokens} tokens "
        f"a rank of {args.hidden} {args.dtype}, top {args.topk} of {args.experts * COMM.size} experts {args.inner} wide"
    )
    with epcy.Buffer(
        COMM,
        num_max_tokens_per_rank=args.tokens,
        num_max_low_latency_tokens_per_rank=args.tokens,
        hidden=args.hidden,
        num_experts=args.experts * COMM.size,
        num_topk=args.topk,
        dtype=args.dtype,
        backend=args.backend,
        low_latency_mode=True,
        preinitialize=True,
        timeout=30,
    ) as buf:
        if buf.xp is not np:
            buf.xp.cuda.Device(buf.options["device"]).use()  # arrays are made on this rank's GPU
        decoder, clock = Decoder(buf, args.layers, args.inner), Clock(buf)
        equal = sums_of(decoder, decoder.in_sequence) == sums_of(decoder, decoder.overlapped)
        if not COMM.allreduce(equal, MPI.LAND):
            raise SystemExit(f"rank {buf.rank}: overlapped and in sequence, the results differ")
        alone, sequence, overlapped = (
            clock.measure(step, args.runs)
            for step in (decoder.communication, decoder.in_sequence, decoder.overlapped)
        )
        say(f"microseconds a step: median of {args.runs} runs, each the slowest rank's")
        say("communication  in sequence  overlapped  hidden")
        share = 100 * (sequence - overlapped) / alone
        say(f"{alone:13.0f}{sequence:13.0f}{overlapped:12.0f}{share:6.0f} %")
        if args.trace is not None:
            steps = {"in sequence": decoder.in_sequence, "overlapped": decoder.overlapped}
            taken = {title: decoder.timeline.take(partial(clock.run, step)) for title, step in steps.items()}
            write_trace(args.trace, COMM, taken)
        buf.check()
        del decoder, clock
    say("overlapped and in sequence, the results are equal to the bit")
    if args.backend == "host":
        say(
            "on the host backend a rank moves rows itself, within its calls: only its waiting for other ranks can be "
            "hidden, as far as the ranks really run at once; in sequence it also waits for what others multiply, so "
            "that more than 100 % may be hidden"
        )
    else:
        say("hidden: (in sequence - overlapped) / communication, of the communication's own time")
        if share > 100:
            say(
                "more than all of it cannot be hidden: these steps wait for the host, which launches their products"
            )


if __name__ == "__main__":
    main()
