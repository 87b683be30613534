"""A mixture-of-experts layer in array code, forward and backward; epcy moves its tokens.

The layer is h + sum_k w_k expert_k(norm(h)). Its two exchanges and their gradients are each other's mirror:

    forward     rows = dispatch(u)                  z = combine(y)
    backward    dy   = dispatch(dz, handle)         du, dw = combine(dx, handle, topk_weights=dw)

A token that went to several ranks got its sum from several ranks, so the gradient of that sum goes to all of them:
the gradient of combine is a dispatch on the same routing. Turned round, the gradients that the copies of a token
collect are added up: the gradient of dispatch is a combine. The gradient of a weight is computed where the expert
lives and comes back with the rows, lane by lane: that is what combine's ``topk_weights`` are for.

Activations are (S, n, H): S shards of n tokens. How many shards a rank has depends on the number of ranks, what a
shard computes does not: every product has the same shape on 1 rank and on 8, so the bits are the same too.
"""

from types import SimpleNamespace

NORM_EPS = 1e-6


class NoExchange:
    """What epcy does, when there is one rank and no epcy: nothing moves. ``--verify`` trains with this."""

    def __init__(self, xp):
        self.xp, self.rank, self.size = xp, 0, 1

    def dispatch(self, x, topk_idx=None, topk_weights=None, *, handle=None):
        return SimpleNamespace(
            recv_x=x, recv_topk_idx=topk_idx, recv_topk_weights=topk_weights, handle=x.shape
        )

    def combine_input(self, handle):
        return self.xp.empty(handle, self.xp.float32)

    def combine(self, x, handle, topk_weights=None):
        return SimpleNamespace(combined_x=x, combined_topk_weights=topk_weights)


class MoELayer:
    """Experts of one layer, those of this rank only, and the router in front of them, which every rank has.

    ``router`` (H, E) is one of the shared parameters; ``w1`` (L, H, F) and ``w2`` (L, F, H) are this rank's.
    """

    def __init__(self, exchange, clock, router, w1, w2, *, num_topk, balance):
        self.exchange, self.clock, self.xp = exchange, clock, exchange.xp
        self.router, self.w1, self.w2 = router, w1, w2
        self.num_topk, self.balance = num_topk, balance

    def forward(self, h):
        """Return h + z (S, n, H) and what backward needs; ``saved.load`` (S, E) counts the tokens of each expert."""
        xp = self.xp
        u, inverse = rms_norm(xp, h)
        logits = u @ self.router
        topk_idx = xp.argsort(-logits, axis=-1)[..., : self.num_topk]
        topk_weights = softmax(xp, xp.take_along_axis(logits, topk_idx, axis=-1))
        chosen = topk_idx[..., None] == xp.arange(logits.shape[-1])  # (S, n, K, E)
        saved = SimpleNamespace(
            u=u,
            inverse=inverse,
            probs=softmax(xp, logits),
            chosen=chosen,
            topk_weights=topk_weights,
            load=chosen.sum(axis=(1, 2)).astype(xp.float32),
            experts=[],
        )
        saved.share = saved.load / max(u.shape[1] * self.num_topk, 1)

        with self.clock("epcy"):
            r = self.exchange.dispatch(_rows(u), _rows(topk_idx), _rows(topk_weights))
            y = self.exchange.combine_input(r.handle)
        saved.handle = r.handle
        y[...] = 0
        for expert in range(len(self.w1)):
            rows, lanes = xp.nonzero(r.recv_topk_idx == expert)
            # Indexing copies: recv_x itself is gone after two more dispatches, this is kept for backward.
            x = r.recv_x[rows]
            hidden = xp.maximum(x @ self.w1[expert], 0)
            out = hidden @ self.w2[expert]
            weight = r.recv_topk_weights[rows, lanes][:, None]
            y[rows] += weight * out
            saved.experts.append((rows, lanes, x, hidden, out, weight))
        with self.clock("epcy"):
            z = self.exchange.combine(y, r.handle).combined_x
        return h + z.reshape(h.shape), saved

    def balance_loss(self, saved):
        """Return (S,): E * sum over experts of (share of tokens) * (mean probability); 1 when all get the same."""
        return saved.probs.shape[-1] * (saved.share * saved.probs.mean(axis=1)).sum(axis=-1)

    def backward(self, dh, saved, grad_router, grad_w1, grad_w2, token_share):
        """Return the gradient of h (S, n, H); write those of the parameters: (S, H, E), (L, H, F), (L, F, H).

        ``token_share`` is what one token weighs in the loss.
        """
        xp = self.xp
        with self.clock("epcy"):
            dy = self.exchange.dispatch(_rows(dh), handle=saved.handle).recv_x
            dx = self.exchange.combine_input(saved.handle)
        dx[...] = 0
        dw = xp.zeros((len(dx), self.num_topk), xp.float32)
        for expert, (rows, lanes, x, hidden, out, weight) in enumerate(saved.experts):
            dout = dy[rows]
            dw[rows, lanes] = (dout * out).sum(axis=1)
            dout *= weight
            dhidden = (dout @ self.w2[expert].T) * (hidden > 0)
            grad_w1[expert] = x.T @ dhidden
            grad_w2[expert] = hidden.T @ dout
            dx[rows] += dhidden @ self.w1[expert].T
        with self.clock("epcy"):
            back = self.exchange.combine(dx, saved.handle, topk_weights=dw)

        # Through the softmax over the chosen experts, and through the one over all experts for the balance.
        dtop = softmax_backward(
            saved.topk_weights, back.combined_topk_weights.reshape(saved.topk_weights.shape)
        )
        dlogits = (saved.chosen * dtop[..., None]).sum(axis=-2)
        dprobs = (self.balance * token_share * saved.probs.shape[-1] * saved.share)[:, None, :]
        dlogits += softmax_backward(saved.probs, dprobs)
        grad_router[...] = saved.u.swapaxes(1, 2) @ dlogits
        du = back.combined_x.reshape(dh.shape) + dlogits @ self.router.T
        return dh + rms_norm_backward(du, saved.u, saved.inverse)


def _rows(x):
    """(S, n, ...) -> (S * n, ...): the exchange knows tokens, not shards."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])


def softmax(xp, x):
    exp = xp.exp(x - x.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def softmax_backward(probs, dprobs):
    return probs * (dprobs - (probs * dprobs).sum(axis=-1, keepdims=True))


def rms_norm(xp, x):
    """Return x scaled to a mean square of 1, and the factor (..., 1)."""
    inverse = 1 / xp.sqrt((x * x).mean(axis=-1, keepdims=True) + xp.float32(NORM_EPS))
    return x * inverse, inverse


def rms_norm_backward(dy, y, inverse):
    return inverse * (dy - y * (dy * y).mean(axis=-1, keepdims=True))
