"""The language model of moe_lm.py: bytes in, the next byte out, with its experts spread over ranks.

    embedding of the last C bytes -> one linear map -> MoE layers -> norm -> scores of 256 bytes

What is shared (all but the experts) every rank has, and trains on its own part of the batch: the gradients are added
over ranks in one fixed order. Experts live on one rank each, and get the tokens of all ranks by epcy.
"""

import numpy as np
from moe_layer import MoELayer, rms_norm, rms_norm_backward, softmax

NUM_SHARDS = 8  # of every batch, whatever the number of ranks: the unit of computation and of order
VOCABULARY = 256


class Parameters:
    """Arrays by name, one after the other in ``flat``; ``shards`` adds a first axis to each."""

    def __init__(self, xp, shapes, shards=None):
        lead = () if shards is None else (shards,)
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])
        self.flat = xp.zeros((*lead, int(ends[-1])), xp.float32)
        for (name, shape), end in zip(shapes.items(), ends.tolist(), strict=True):
            setattr(self, name, self.flat[..., end - int(np.prod(shape)) : end].reshape(*lead, *shape))


class Adam:
    """Adam on one flat array, with warm-up and a cosine fall to a tenth."""

    def __init__(self, xp, parameters, *, rate, num_steps, warmup=20):
        self.xp, self.x = xp, parameters
        self.mean, self.square = xp.zeros_like(parameters), xp.zeros_like(parameters)
        self.rate, self.num_steps, self.warmup, self.step = rate, num_steps, warmup, 0

    def update(self, gradient):
        self.step += 1
        progress = min(self.step / self.num_steps, 1)
        rate = self.rate * min(self.step / self.warmup, 1) * (0.55 + 0.45 * np.cos(np.pi * progress))
        self.mean += 0.1 * (gradient - self.mean)
        self.square += 0.01 * (gradient * gradient - self.square)
        scale = float(rate * np.sqrt(1 - 0.99**self.step) / (1 - 0.9**self.step))
        self.x -= scale * self.mean / (self.xp.sqrt(self.square) + 1e-8)


class Model:
    """Parameters of this rank, and a step of training. Every method is collective over the ranks of ``exchange``."""

    def __init__(self, exchange, comm, clock, *, sizes, seed, num_steps, rate):
        self.xp, self.comm, self.clock, self.sizes = exchange.xp, comm, clock, sizes
        xp, s = self.xp, sizes
        self.num_local_experts = s.experts // exchange.size
        dense = {
            "embedding": (VOCABULARY, s.embedding),
            "mixer": (s.context * s.embedding, s.hidden),
            "router": (s.layers, s.hidden, s.experts),
            "head": (s.hidden, VOCABULARY),
        }
        local = {
            "w1": (s.layers, self.num_local_experts, s.hidden, s.inner),
            "w2": (s.layers, self.num_local_experts, s.inner, s.hidden),
        }
        # What the ranks add up besides gradients travels behind them, in the same message.
        counted = {"loss": (1,), "balance_loss": (1,), "load": (s.layers, s.experts)}
        self.dense, self.local = Parameters(xp, dense), Parameters(xp, local)
        self.grads, self.local_grads = (
            Parameters(xp, dense | counted, NUM_SHARDS // exchange.size),
            Parameters(xp, local),
        )
        self.totals = Parameters(xp, dense | counted)
        self._initialize(exchange.rank * self.num_local_experts, seed)
        self.layers = [
            MoELayer(
                exchange,
                clock,
                self.dense.router[i],
                self.local.w1[i],
                self.local.w2[i],
                num_topk=s.topk,
                balance=s.balance,
            )
            for i in range(s.layers)
        ]
        self.optimizers = [
            Adam(xp, part.flat, rate=rate, num_steps=num_steps) for part in (self.dense, self.local)
        ]

    def _initialize(self, first_expert, seed):
        """Draw parameters; an expert's own seed makes it the same on whatever rank it lives."""

        def draw(key, shape, fan_in):
            values = np.random.default_rng([seed, *key]).standard_normal(shape, np.float32) / np.float32(
                np.sqrt(fan_in)
            )
            return self.xp.asarray(values)

        d, s = self.dense, self.sizes
        d.embedding[...] = draw((0,), d.embedding.shape, 1)
        d.mixer[...] = draw((1,), d.mixer.shape, s.embedding)
        # A byte says the less about the next one the farther back it is.
        distance = np.repeat(np.arange(s.context, 0, -1, dtype=np.float32), s.embedding)[:, None]
        d.mixer *= self.xp.asarray(1 / distance)
        d.head[...] = draw((2,), d.head.shape, s.hidden) * 0.1
        for layer in range(s.layers):
            d.router[layer] = draw((3, layer), d.router.shape[1:], s.hidden)
            for i in range(self.num_local_experts):
                key = 4, layer, first_expert + i
                self.local.w1[layer, i] = draw((*key, 0), self.local.w1.shape[2:], s.hidden)
                self.local.w2[layer, i] = draw((*key, 1), self.local.w2.shape[2:], s.inner) * 0.5

    def forward(self, contexts):
        """Return scores (S, n, 256) for contexts (S, n, C) of bytes, and what backward needs."""
        embedded = self.dense.embedding[contexts].reshape(*contexts.shape[:2], self.dense.mixer.shape[0])
        h, saved = embedded @ self.dense.mixer, []
        for layer in self.layers:
            h, of_layer = layer.forward(h)
            saved.append(of_layer)
        y, inverse = rms_norm(self.xp, h)
        return y @ self.dense.head, (contexts, embedded, saved, y, inverse)

    def loss(self, scores, targets):
        """Return probabilities (S, n, 256) and the mean loss of each shard (S,), in nats a byte."""
        probs = softmax(self.xp, scores)
        right = self.xp.take_along_axis(probs, targets[..., None], axis=-1)[..., 0]
        return probs, -self.xp.log(right + self.xp.float32(1e-30)).mean(axis=1)

    def train_step(self, contexts, targets):
        """Train on this rank's shards; return (loss, balance loss, load (layers, E)) of the whole batch."""
        scores, (contexts, embedded, saved, y, inverse) = self.forward(contexts)
        probs, loss = self.loss(scores, targets)
        g, s, xp = self.grads, self.sizes, self.xp
        token_share = 1 / (NUM_SHARDS * targets.shape[1])
        g.loss[:, 0] = loss
        g.balance_loss[:, 0] = (
            sum(layer.balance_loss(of) for layer, of in zip(self.layers, saved, strict=True)) / s.layers
        )
        for i, of_layer in enumerate(saved):
            g.load[:, i] = of_layer.load

        dscores = (probs - (targets[..., None] == xp.arange(VOCABULARY))) * xp.float32(token_share)
        g.head[...] = y.swapaxes(1, 2) @ dscores
        dh = rms_norm_backward(dscores @ self.dense.head.T, y, inverse)
        for i in reversed(range(s.layers)):
            dh = self.layers[i].backward(
                dh, saved[i], g.router[:, i], self.local_grads.w1[i], self.local_grads.w2[i], token_share
            )
        g.mixer[...] = embedded.swapaxes(1, 2) @ dh
        dembedded = (dh @ self.dense.mixer.T).reshape(len(dh), -1, s.embedding)
        # Adding rows that share a byte is a product with a matrix of zeros and ones: one order, on any device.
        for shard, read in enumerate(contexts.reshape(len(contexts), -1)):
            same = (read == xp.arange(VOCABULARY)[:, None]).astype(xp.float32)
            g.embedding[shard] = same @ dembedded[shard]

        self.totals.flat[...] = self._sum_over_ranks(g.flat)
        self.optimizers[0].update(self.totals.flat[: len(self.dense.flat)])
        self.optimizers[1].update(self.local_grads.flat)
        t = self.totals
        return float(t.loss[0]) / NUM_SHARDS, float(t.balance_loss[0]) / NUM_SHARDS, to_host(t.load).copy()

    def evaluate(self, contexts, targets):
        """Return the mean loss of the whole batch, without training on it."""
        loss = self.loss(self.forward(contexts)[0], targets)[1]
        return float(self._sum_over_ranks(loss[:, None])[0]) / NUM_SHARDS

    def _sum_over_ranks(self, shards):
        """Add (S, ...) over the shards of all ranks, in pairs: the same additions for 1, 2, 4 or 8 ranks."""
        mine = add_in_pairs(list(shards))
        if self.comm is None:
            return mine
        with self.clock("gradients"):
            mine = to_host(mine)
            everyones = np.empty((self.comm.size, *mine.shape), np.float32)
            self.comm.Allgather(np.ascontiguousarray(mine), everyones)
        return self.xp.asarray(add_in_pairs(list(everyones)))


def add_in_pairs(parts):
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def to_host(array):
    """Return a NumPy array: a CuPy array knows how to become one, a NumPy array is one."""
    return array.get() if hasattr(array, "get") else array
