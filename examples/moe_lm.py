"""Train a byte-level mixture-of-experts language model whose experts are spread over ranks by epcy.

    mpiexec -n 4 python -m mpi4py examples/moe_lm.py
    mpiexec -n 4 python -m mpi4py examples/moe_lm.py --verify --plot loss.png

It reads the sources of the Python standard library. The number of ranks must divide 8, the number of experts and of
shards of a batch; it changes who computes what, and no bit of the result. ``--verify`` shows that: it trains again on
one rank without epcy and compares. moe_layer.py has the exchange, moe_model.py the rest of the model.
"""

import os

for _name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # one thread a rank, and one order of sums; before NumPy is imported

import argparse
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
from moe_layer import NoExchange
from moe_model import NUM_SHARDS, Model, to_host
from moe_text import read_standard_library, unigram_entropy
from mpi4py import MPI

import epcy

COMM = MPI.COMM_WORLD
SIZES = SimpleNamespace(
    context=16, embedding=24, hidden=128, inner=256, layers=2, experts=8, topk=2, balance=0.1
)
NUM_EVALUATIONS = 4  # batches of the validation loss
PROMPTS = (
    "def __init__(self, ",
    "    for i in range(",
    "import os\nimport ",
    "    if not isinstance(",
)


class Clock:
    """Add up, by name, the time spent in ``with clock(name):``, work on the device and waiting included."""

    def __init__(self, synchronize):
        self.synchronize, self.seconds = synchronize, {"epcy": 0.0, "gradients": 0.0}

    @contextmanager
    def __call__(self, name):
        self.synchronize()
        start = time.perf_counter()
        yield
        self.synchronize()
        self.seconds[name] += time.perf_counter() - start


def batch_of(text, rng, num_tokens, rank, size):
    """Draw a whole batch, the same on every rank, and return this rank's shards of it: (S, n, C) and (S, n)."""
    positions = rng.integers(SIZES.context, len(text), num_tokens).reshape(NUM_SHARDS, -1)
    mine = np.split(positions, size)[rank]
    return text[mine[..., None] + np.arange(-SIZES.context, 0)], text[mine]


def train(exchange, comm, texts, args, bar):
    """Train; return the model, the loss of each step, (step, validation loss) pairs and the load of the experts."""
    xp = exchange.xp
    device = getattr(xp, "cuda", None)
    clock = Clock(device.get_current_stream().synchronize if device else lambda: None)
    model = Model(exchange, comm, clock, sizes=SIZES, seed=args.seed, num_steps=args.steps, rate=args.rate)

    def evaluate():
        rng = np.random.default_rng([args.seed, 1])
        parts = [
            batch_of(texts[1], rng, args.batch, exchange.rank, exchange.size) for _ in range(NUM_EVALUATIONS)
        ]
        return float(np.mean([model.evaluate(xp.asarray(c), xp.asarray(t)) for c, t in parts]))

    rng = np.random.default_rng([args.seed, 0])
    losses, checks, loads = [], [], []
    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        contexts, targets = batch_of(texts[0], rng, args.batch, exchange.rank, exchange.size)
        loss, balance, load = model.train_step(xp.asarray(contexts), xp.asarray(targets))
        losses.append(loss)
        loads.append(load)
        seconds = time.perf_counter() - start
        bar.step(
            loss=f"{loss:.3f}",
            balance=f"{balance:.2f}",
            tokens_s=f"{step * args.batch / seconds:,.0f}",
            communication=f"{100 * sum(clock.seconds.values()) / seconds:.0f}%",
        )
        if step % args.evaluate_every == 0 or step == args.steps:
            checks.append((step, evaluate()))
            bar.say(f"step {step:5d}   loss {loss:.4f}   validation {checks[-1][1]:.4f} nats a byte")
    seconds = time.perf_counter() - start
    load = sum(loads[-max(args.steps // 4, 1) :])  # what the routers have come to
    result = SimpleNamespace(
        losses=losses,
        checks=checks,
        load=load / load.sum(axis=1, keepdims=True),
        seconds=seconds,
        share={name: spent / seconds for name, spent in clock.seconds.items()},
    )
    return model, result


class Bar:
    """The progress bar of rank 0 (tqdm where it is installed), and its voice; other ranks are silent."""

    def __init__(self, num_steps, title, silent):
        self.bar, self.silent = None, silent
        if not silent:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self.bar = tqdm(total=num_steps, desc=title, unit="step", mininterval=0.5, dynamic_ncols=True)

    def step(self, **shown):
        if self.bar is not None:
            self.bar.set_postfix(shown, refresh=False)
            self.bar.update()

    def say(self, text):
        if self.bar is not None:
            self.bar.write(text, file=sys.stdout)
        elif not self.silent:
            print(text, flush=True)

    def close(self):
        if self.bar is not None:
            self.bar.close()


def sample(model, xp, rank, seed, num_bytes, temperature=0.7):
    """Continue the prompts; rank 0 holds the contexts, the other ranks take part with no token at all."""
    rng = np.random.default_rng([seed, 2])
    texts = [bytearray(prompt.encode()) for prompt in PROMPTS] if rank == 0 else []
    for _ in range(num_bytes):
        contexts = np.array([text[-SIZES.context :] for text in texts], np.uint8).reshape(
            1, len(texts), SIZES.context
        )
        scores = to_host(model.forward(xp.asarray(contexts))[0])[0] / temperature
        for text, of_text in zip(texts, scores, strict=True):
            text.append(int(np.argmax(of_text + rng.gumbel(size=len(of_text)))))
    return [text.decode("utf-8", "replace") for text in texts]


def verify(result, texts, args):
    """Train again on rank 0, with the whole batch and without epcy; return whether the two runs agree."""
    bar = Bar(args.steps, "verify", COMM.rank != 0)
    agree = None
    if COMM.rank == 0:
        bar.say("the same training on one rank, without epcy:")
        alone = train(NoExchange(np), None, texts, args, bar)[1]
        first = min(20, args.steps)
        ours, theirs = np.array(result.losses), np.array(alone.losses)
        worst = float(np.max(np.abs(ours - theirs)[:first] / theirs[:first]))
        final = abs(result.checks[-1][1] - alone.checks[-1][1]) / alone.checks[-1][1]
        agree = worst <= 1e-5 and final <= 0.01 and abs(ours[-1] - theirs[-1]) <= 0.01 * theirs[-1]
        bar.close()
        same = int(np.sum(ours == theirs))
        print(
            f"verify: first {first} losses agree within {worst:.1e} relative (limit 1e-05); equal to the bit in "
            f"{same} of {args.steps} steps\n"
            f"verify: final loss {ours[-1]:.6f} with epcy on {COMM.size} ranks, {theirs[-1]:.6f} on one without; "
            f"validation {result.checks[-1][1]:.6f} and {alone.checks[-1][1]:.6f} "
            f"({100 * final:.2g} % apart, limit 1 %)\n"
            f"verify: {'the runs agree' if agree else 'THE RUNS DIFFER'}",
            flush=True,
        )
    request = COMM.Ibarrier()  # the others sleep: waiting in a barrier would take the core away
    while not request.Test():
        time.sleep(0.02)
    return COMM.bcast(agree)


def draw(result, entropy, path):
    """Write a plot of the losses and of the load of the experts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot(range(1, len(result.losses) + 1), result.losses, lw=1, label="training")
    left.plot(*zip(*result.checks, strict=True), "o-", label="validation")
    left.axhline(entropy, color="gray", ls="--", label="unigram entropy")
    left.set(xlabel="step", ylabel="loss, nats a byte")
    left.legend()
    for layer, shares in enumerate(100 * result.load):
        right.bar(np.arange(len(shares)) + 0.4 * layer - 0.2, shares, 0.4, label=f"layer {layer}")
    right.set(xlabel="expert", ylabel="load, %", ylim=(0, 125 * result.load.max()))
    right.legend()
    figure.savefig(path)


def report(result, texts, args):
    """Print what the run came to, on rank 0."""
    entropy, final = unigram_entropy(texts[1]), result.checks[-1][1]
    print(
        f"\n{args.steps} steps in {result.seconds:.1f} s: {args.steps * args.batch / result.seconds:,.0f} tokens/s, "
        f"{100 * sum(result.share.values()):.0f} % of the time in communication, waiting included "
        f"({100 * result.share['epcy']:.0f} % in epcy, {100 * result.share['gradients']:.0f} % adding up gradients)"
    )
    for layer, shares in enumerate(result.load):
        print(
            f"load of the experts, layer {layer}, last quarter of the steps: "
            + " ".join(f"{100 * share:.1f}" for share in shares)
            + " %"
        )
    print(
        f"validation loss {final:.3f} nats a byte; unigram entropy of that text {entropy:.3f}: "
        f"{entropy - final:.3f} better",
        flush=True,
    )
    if args.plot:
        draw(result, entropy, args.plot)


def parse():
    parser = argparse.ArgumentParser("moe_lm.py", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--steps", type=int, default=300, help="training steps (%(default)s)")
    add("--batch", type=int, default=4096, help="tokens a step, over all ranks (%(default)s)")
    add("--rate", type=float, default=8e-3, help="Adam's largest rate (%(default)s)")
    add("--seed", type=int, default=0, help="of parameters and batches (%(default)s)")
    add("--text-bytes", type=int, default=6_000_000, help="of the standard library (%(default)s)")
    add("--sample-bytes", type=int, default=160, help="to write for each prompt at the end (%(default)s)")
    add("--evaluate-every", type=int, default=50, help="steps between validations (%(default)s)")
    add("--backend", choices=("host", "nvshmem"), help="what moves the tokens (epcy's choice)")
    add("--verify", action="store_true", help="train again on one rank without epcy, and compare")
    add("--plot", metavar="FILE", help="draw losses and loads (matplotlib)")
    args = parser.parse_args()
    if args.steps < 1 or args.evaluate_every < 1:
        parser.error("argument --steps, --evaluate-every: expected 1 or more")
    if args.batch < NUM_SHARDS or args.batch % NUM_SHARDS:
        parser.error(f"argument --batch: {args.batch} is not a multiple of the {NUM_SHARDS} shards")
    if NUM_SHARDS % COMM.size or SIZES.experts % COMM.size:
        parser.error(
            f"{COMM.size} ranks do not divide {NUM_SHARDS} shards and {SIZES.experts} experts; use 1, 2, 4 or 8"
        )
    return args


def on_rank_0(function):
    """Call ``function`` on rank 0 and return its result everywhere; where it exits, all ranks exit."""
    result = stop = None
    if COMM.rank == 0:
        try:
            result = function()
        except SystemExit as exit_:
            stop = exit_
            sys.stdout.flush()
    result, stop = COMM.bcast((result, stop))
    if stop is not None:
        raise stop if COMM.rank == 0 else SystemExit(2 if stop.code else 0)
    return result


def main():
    args = on_rank_0(parse)
    texts = on_rank_0(lambda: read_standard_library(args.text_bytes))
    with epcy.Buffer(
        COMM,
        num_max_tokens_per_rank=max(args.batch // COMM.size, len(PROMPTS)),
        hidden=SIZES.hidden,
        num_experts=SIZES.experts,
        num_topk=SIZES.topk,
        dtype="float32",
        backend=args.backend,
    ) as buf:
        if buf.xp is not np:
            buf.xp.cuda.Device(buf.options["device"]).use()  # arrays are made on this rank's GPU
        bar = Bar(args.steps, f"train on {COMM.size} ranks", COMM.rank != 0)
        bar.say(
            f"{len(texts[0]):,} bytes to train on, {len(texts[1]):,} for validation; {SIZES.layers} layers of "
            f"{SIZES.experts} experts on {COMM.size} ranks, {buf.backend} backend"
        )
        model, result = train(buf, COMM, texts, args, bar)
        bar.close()
        if COMM.rank == 0:
            report(result, texts, args)
        for text in sample(model, buf.xp, COMM.rank, args.seed, args.sample_bytes):
            print("-" * 72, text, sep="\n", flush=True)
    if args.verify and not verify(result, texts, args):
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        if COMM.rank == 0:
            print("\nstopped", file=sys.stderr, flush=True)
        sys.exit(130)
