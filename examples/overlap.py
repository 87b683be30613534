"""One mixture-of-experts layer whose communication runs beside a matrix product, and how much of it that hides.

    mpiexec -n 2 python -m mpi4py examples/overlap.py --backend nvshmem

The layer adds a shared expert, two products that need no other rank, to what comes back from the routed experts:

    z = combine(experts(dispatch(x))) + (x @ w1) @ w2

The first product needs nothing of dispatch, the second nothing of combine. With ``async_finish=True`` the two calls go
to epcy's own stream, and the products to the current one, which waits for an event where it needs the rows. A kernel
that communicates holds ``num_sms`` multiprocessors and leaves the others to the products: few are enough to fill the
link, more make the products wait. The routed experts are left out (each returns its rows as they came): they run
between the two calls in any order.

On the host backend a call is over when it returns, so there is nothing to hide; the example runs and says so.
"""

import argparse
import time

import numpy as np
from mpi4py import MPI

import epcy
from epcy import backends

COMM = MPI.COMM_WORLD
WARMUP = 3
# tokens a rank, H, inner width of the shared expert, dtype, num_sms
DEFAULTS = {
    "nvshmem": (4096, 7168, 2048, "float16", [8, 16, 24, 64]),
    "host": (256, 512, 256, "float32", [1]),
}


class Layer:
    """The layer on one rank: its tokens, their experts, and the shared expert, which every rank has."""

    def __init__(self, buf, inner):
        xp, options = buf.xp, buf.options
        tokens, hidden, experts = (
            options["num_max_tokens_per_rank"],
            options["hidden"],
            options["num_experts"],
        )
        rng = np.random.default_rng(buf.rank)

        def draw(*shape):
            return xp.asarray(
                (rng.standard_normal(shape, np.float32) / shape[0] ** 0.5).astype(options["dtype"])
            )

        self.buf, self.x = buf, draw(tokens, hidden)
        self.topk_idx = xp.asarray(rng.random((tokens, experts)).argsort(1)[:, : options["num_topk"]])
        self.w1, self.w2 = draw(hidden, inner), draw(inner, hidden)

    def communication(self):
        r = self.buf.dispatch(self.x, self.topk_idx)
        return self.buf.combine(r.recv_x, r.handle).combined_x

    def products(self):
        return self.x @ self.w1 @ self.w2

    def in_sequence(self):
        r = self.buf.dispatch(self.x, self.topk_idx)
        inner = self.x @ self.w1
        z = self.buf.combine(r.recv_x, r.handle)
        return z.combined_x + inner @ self.w2

    def overlapped(self):
        r = self.buf.dispatch(self.x, self.topk_idx, async_finish=True)
        inner = self.x @ self.w1  # while tokens are under way
        r.event.current_stream_wait()
        z = self.buf.combine(r.recv_x, r.handle, async_finish=True)
        shared = inner @ self.w2  # while sums are under way
        z.event.current_stream_wait()
        return z.combined_x + shared


def microseconds(xp, function):
    """Time one call, on the current stream where there is one."""
    if xp is np:
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e6
    start, end = xp.cuda.Event(), xp.cuda.Event()
    start.record()
    function()
    end.record()
    end.synchronize()
    return xp.cuda.get_elapsed_time(start, end) * 1e3


def measure(buf, function, num_runs):
    """Return the median over the runs of what the slowest rank took."""
    for _ in range(WARMUP):
        function()
    times = np.zeros(num_runs)
    for run in range(num_runs):
        buf.barrier()
        times[run] = microseconds(buf.xp, function)
    COMM.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return float(np.median(times))


def compare(buf, layer):
    """Stop where the two orders of the same work differ in a bit, on any rank."""
    one, other = layer.in_sequence(), layer.overlapped()
    if not COMM.allreduce(one.tobytes() == other.tobytes(), MPI.LAND):
        raise SystemExit(f"rank {buf.rank}: overlapped and in sequence, the results differ")


def parse(argv):
    parser = argparse.ArgumentParser("overlap.py", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--backend", choices=("host", "nvshmem"), help="what moves the tokens (epcy's choice)")
    add("--tokens", type=int, help="a rank (4096; on the host 256)")
    add("--hidden", type=int, help="elements of a token (7168; on the host 512)")
    add("--inner", type=int, help="inner width of the shared expert (2048; on the host 256)")
    add("--experts", type=int, default=32, help="on each rank (%(default)s)")
    add("--topk", type=int, default=8, help="experts of a token (%(default)s)")
    add("--runs", type=int, default=20, help="of each measurement (%(default)s)")
    add("--num-sms", type=int, nargs="+", help="one row of the table each (8 16 24 64; on the host 1 thread)")
    args = parser.parse_args(argv)
    args.backend = backends.find(args.backend)[0]
    tokens, hidden, inner, args.dtype, num_sms = DEFAULTS[args.backend]
    args.tokens, args.hidden = args.tokens or tokens, args.hidden or hidden
    args.inner, args.num_sms = args.inner or inner, args.num_sms or num_sms
    return args


def main(argv=None):
    args = parse(argv)

    def say(text):
        if COMM.rank == 0:
            print(text, flush=True)

    say(
        f"{args.backend} backend, {COMM.size} ranks, {args.tokens} tokens a rank of {args.hidden} {args.dtype}, "
        f"top {args.topk} of {args.experts * COMM.size} experts; products {args.hidden} x {args.inner} and back\n"
        f"microseconds: median of {args.runs} runs, each the slowest rank's"
    )
    say("num_sms  communication  products  in sequence  overlapped  hidden")
    for num_sms in args.num_sms:
        with epcy.Buffer(
            COMM,
            num_max_tokens_per_rank=args.tokens,
            hidden=args.hidden,
            num_experts=args.experts * COMM.size,
            num_topk=args.topk,
            num_max_recv_tokens=args.tokens * COMM.size,
            dtype=args.dtype,
            backend=args.backend,
            num_sms=num_sms,
            timeout=30,
        ) as buf:
            if buf.xp is not np:
                buf.xp.cuda.Device(buf.options["device"]).use()  # arrays are made on this rank's GPU
            layer = Layer(buf, args.inner)
            compare(buf, layer)
            times = [
                measure(buf, function, args.runs)
                for function in (layer.communication, layer.products, layer.in_sequence, layer.overlapped)
            ]
            alone, products, sequence, overlapped = times
            hidden = "nothing" if buf.xp is np else f"{100 * (sequence - overlapped) / alone:.0f} %"
            say(f"{num_sms:7d}{alone:15.0f}{products:10.0f}{sequence:13.0f}{overlapped:12.0f}{hidden:>8}")
            del layer
    say("overlapped and in sequence, the results are equal to the bit")
    if args.backend == "host":
        say(
            "the host backend's calls are over when they return: nothing runs beside them, and nothing is hidden"
        )
    else:
        say("hidden: (in sequence - overlapped) / communication, of the communication's own time")


if __name__ == "__main__":
    main()
