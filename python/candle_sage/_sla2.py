"""SLA2 (arXiv 2602.12675): a router selects blocks of keys, and linear attention approximates the rest."""

from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from . import _core
from ._api import Scheme, attention
from ._errors import _error


class SLA2(nn.Module):
    """Attention to selected blocks of keys, mixed with linear attention (the tail).

    For a query `i` of a block of 128 queries `I`, where `S(I)` are the selected blocks of 128 keys:

        Os_i = attention over S(I), in the numerics of a scheme; with a causal mask also over the block on the diagonal
        Ol_i = phi(q_i) H_I / (phi(q_i) . z_I),  H_I = sum of phi(k_j)^T v_j,  z_I = sum of phi(k_j)
        a_i  = sigmoid(theta + log(keys seen exactly / keys left to the tail)),  1 if no key is left
        O_i  = a_i Os_i + (1 - a_i) Ol_i

    `phi` is the softmax over channels. The candidates of a block of queries are all blocks of keys, with a causal mask
    the blocks before the diagonal. The router scores a candidate `J` by `(Rq qbar_I) . (Rk kbar_J) / sqrt(head_dim)`
    from means of queries and of keys, and selects the candidates with the largest scores. With a causal mask `qbar` is
    the mean of the last queries up to the block's first query, so no query depends on later tokens. The selection has
    no gradient: train the router by adding `router_loss` to the model's loss. This package's kernels compute the
    attention to selected blocks; router, tail and mixture are PyTorch operators.

    query_heads, key_heads, head_dim: the shape of the tensors.
    scheme, settings: as for `attention`.
    blocks: the largest number of candidates that a block of queries selects.
    nearest: with a causal mask, the number of these blocks that are always the nearest before the diagonal.
    causal, scale, deterministic: as for `attention`; with a causal mask queries and keys have equal lengths.
    tail: the blocks that `H_I` and `z_I` sum over: "past" (all candidates), "complement" (the candidates that are not
        selected, as published), or None for no tail and no mixture.
    alpha: the weight `a`: "count" (see above) or "constant" (`sigmoid(theta)`, as published).
    pool: with a causal mask, the number of queries in `qbar`.

    Parameters, all float32: `query_router` and `key_router`, (key heads, head_dim, head_dim), which start as
    identities; `theta`, (query heads), which starts at 2.
    """

    def __init__(
        self,
        query_heads: int,
        key_heads: int,
        head_dim: int,
        scheme: Scheme = "fpa",
        *,
        blocks: int = 4,
        nearest: int = 0,
        causal: bool = False,
        scale: float | None = None,
        deterministic: bool = False,
        tail: Literal["past", "complement"] | None = "past",
        alpha: Literal["count", "constant"] = "count",
        pool: int = 32,
        **settings: str | bool | int,
    ):
        super().__init__()
        for name, value, allowed in (("tail", tail, ("past", "complement", None)), ("alpha", alpha, ("count", "constant"))):
            if value not in allowed:
                raise _error(f"unknown {name}", value, ", ".join(map(str, allowed)), "leave it out for the default")
        for name, value, least in (("blocks", blocks, 0 if causal else 1), ("nearest", nearest, 0), ("pool", pool, 1)):
            if value < least:
                raise _error(f"{name} is too small", value, f"at least {least}", "leave it out for the default")
        if nearest > (blocks if causal else 0):
            allowed = f"0 to {blocks}, the number of blocks" if causal else "0 without a causal mask"
            raise _error("the nearest blocks cannot be selected", nearest, allowed, "`nearest` counts towards `blocks`")
        if key_heads < 1 or query_heads % key_heads:
            raise _error(
                "query_heads is not a multiple of key_heads", f"{query_heads} query heads, {key_heads} key heads",
                "key_heads of at least 1, and query_heads a multiple of it", "equal numbers are usual",
            )
        self.query_router = nn.Parameter(torch.eye(head_dim).repeat(key_heads, 1, 1))
        self.key_router = nn.Parameter(torch.eye(head_dim).repeat(key_heads, 1, 1))
        self.theta = nn.Parameter(torch.full((query_heads,), 2.0))
        self.scheme, self.settings, self.causal, self.scale, self.deterministic = scheme, settings, causal, scale, deterministic
        self.blocks, self.nearest, self.tail, self.alpha, self.pool = blocks, nearest, tail, alpha, pool

    def extra_repr(self) -> str:
        return f"{self.scheme}, blocks={self.blocks}, nearest={self.nearest}, causal={self.causal}, tail={self.tail}, alpha={self.alpha}"

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, selected: torch.Tensor | None = None) -> torch.Tensor:
        """The output, (batch, sequence, query heads, head_dim). `selected` replaces the result of `select`."""
        self._check(query, key, value)
        selected = self.select(query, key) if selected is None else selected
        sparse = attention(
            query, key, value, self.scheme, causal=self.causal, scale=self.scale, blocks=selected,
            deterministic=self.deterministic, **self.settings,
        )
        if self.tail is None:
            return sparse
        with torch.autocast(query.device.type, enabled=False):
            weight = self._weight(selected, query, key)[..., None]
            linear = self._linear(query, key, value, selected)
            return (weight * sparse.float() + (1.0 - weight) * linear).to(sparse.dtype)

    @torch.no_grad()
    def select(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """The blocks of keys that each block of queries selects, (batch, key heads, blocks of queries, blocks of keys)
        in bool, for the argument `blocks` of `attention`. With a causal mask the result excludes the diagonal."""
        self._check(query, key)
        candidates = self._candidates(query, key)
        # A NaN counts as the largest score. Of blocks with equal scores, earlier blocks are selected first.
        scores = self._scores(query, key).nan_to_num(nan=torch.inf)
        near = candidates & ~candidates.tril(-1 - self.nearest)
        scores = scores.masked_fill(near, torch.inf) if self.nearest else scores
        scores = scores.masked_fill(~candidates, -torch.inf)
        chosen = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., : self.blocks]
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True) & candidates

    def router_loss(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """The loss of the router: the cross-entropy of the softmax of its scores over the candidates, with dense
        attention's probability mass on each candidate as the target. Only the router gets a gradient. Computing the
        target takes as long as a forward of dense attention, but does not need memory for all logits."""
        self._check(query, key)
        query, key = query.detach(), key.detach()
        mass = self._mass(query, key)
        scores = self._scores(query, key).masked_fill(~self._candidates(query, key), -1e30)
        return -(mass * scores.log_softmax(-1)).sum() / mass.sum().clamp_min(torch.finfo(torch.float32).tiny)

    def _check(self, query, key, value=None):
        (key_heads, head_dim, _), query_heads = self.key_router.shape, len(self.theta)
        for name, x, heads in (("query", query, query_heads), ("key", key, key_heads), ("value", key if value is None else value, key_heads)):
            if x.dim() != 4 or tuple(x.shape[2:]) != (heads, head_dim):
                raise _error(f"{name} does not fit this SLA2", list(x.shape), f"(batch, sequence, {heads}, {head_dim})", "SLA2(query_heads, key_heads, head_dim, ..)")
        if self.causal and query.shape[1] != key.shape[1]:
            raise _error("a causal mask needs as many queries as keys", f"{query.shape[1]} queries, {key.shape[1]} keys", "equal lengths", "decoding with a cache is not supported")

    def _candidates(self, query, key):
        """Whether a block of keys is a candidate of a block of queries."""
        rows, columns = (-(-x.shape[1] // _SIDE) for x in (query, key))
        every = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
        return every.tril(-1) if self.causal else every

    def _scores(self, query, key):
        """The router's scores, (batch, key heads, blocks of queries, blocks of keys)."""
        with torch.autocast(query.device.type, enabled=False):
            sizes = _sizes(key)
            of_key = (_blocks(key.detach().float()).sum(2) / sizes[:, None, None]).transpose(1, 2)
            query = query.detach().float()
            if self.causal:
                first = torch.arange(0, query.shape[1], _SIDE, device=query.device)
                at = first[:, None] - torch.arange(self.pool, device=query.device)
                there = (at >= 0).float()[..., None, None]
                means = (query[:, at.clamp_min(0)] * there).sum(2) / there.sum(1)
            else:
                means = _blocks(query).sum(2) / _sizes(query)[:, None, None]
            of_query = means.unflatten(2, (self.key_router.shape[0], -1)).mean(3).transpose(1, 2)
            scores = (of_query @ self.query_router.float().mT) @ (of_key @ self.key_router.float().mT).mT
            return scores * query.shape[-1] ** -0.5

    @torch.no_grad()
    def _mass(self, query, key):
        """Dense attention's mass on each candidate, summed over a block's queries and the query heads of a key head."""
        with torch.autocast(query.device.type, enabled=False):
            scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
            candidates, rows = self._candidates(query, key), []
            query, key = query.float(), key.float().transpose(1, 2)
            for first in range(0, query.shape[1], _SIDE):
                some = query[:, first : first + _SIDE].unflatten(2, (key.shape[1], -1)).permute(0, 2, 3, 1, 4)
                logits = some.flatten(2, 3) @ key.mT * scale
                logits = logits.unflatten(2, some.shape[2:4])
                if self.causal:
                    at = torch.arange(first, first + some.shape[3], device=query.device)
                    logits = logits.masked_fill(torch.arange(key.shape[2], device=query.device) > at[:, None], -torch.inf)
                of_keys = logits.softmax(-1).sum((2, 3))
                rows.append(functional.pad(of_keys, (0, -key.shape[2] % _SIDE)).unflatten(-1, (-1, _SIDE)).sum(-1))
            return torch.stack(rows, 2) * candidates

    def _weight(self, selected, query, key):
        """The weight of attention to the selected blocks, (batch, queries, query heads)."""
        sizes, queries = _sizes(key), query.shape[1]
        exactly = (selected * sizes).sum(-1)
        left = (self._candidates(query, key) * sizes).sum(-1) - exactly
        # (batch, key heads, blocks) -> (batch, queries, query heads)
        spread = lambda x: x.repeat_interleave(_SIDE, 2)[..., :queries].transpose(1, 2).repeat_interleave(len(self.theta) // x.shape[1], 2)
        exactly, left = spread(exactly), spread(left)
        theta = self.theta.float().expand(exactly.shape)
        if self.alpha == "constant":
            return torch.where(left > 0, theta.sigmoid(), 1.0)
        if self.causal:
            on_diagonal = torch.arange(queries, device=query.device) % _SIDE + 1
            exactly = exactly + on_diagonal[:, None]
        return (theta + exactly.log() - left.log()).sigmoid()

    def _linear(self, query, key, value, selected):
        """Linear attention over the tail, in float32; zeros for queries without a tail. Matmuls have operands of the
        inputs' type. States are divided by the number of tokens, which keeps them in float16's range. This factor
        cancels in the output."""
        dtype, group = query.dtype, query.shape[2] // key.shape[2]
        key = key.float()
        if not self.causal:
            key = key - key.mean(1, keepdim=True)
        of_key = _blocks(key.softmax(-1))
        states = torch.einsum("bnthd,bnthe->bhnde", of_key.to(dtype), _blocks(value)).float() / _SIDE
        norms = of_key.sum(2).transpose(1, 2) / _SIDE
        rows = selected.shape[2]
        if self.tail == "complement":
            weights = (self._candidates(query, key) & ~selected).float() / states.shape[2]
            over = lambda x: (weights @ x.flatten(3)).unflatten(-1, x.shape[3:])
        elif self.causal:
            count = torch.arange(1, rows + 1, device=key.device)
            # Query block I + 1 uses the mean of x over key blocks 0 to I. The mean over all key blocks is not used.
            means = lambda x: x.cumsum(2) / count.view(-1, *(1 for _ in x.shape[3:]))
            over = lambda x: functional.pad(means(x)[:, :, :-1], (0, 0) * (x.dim() - 3) + (1, 0))
        else:
            over = lambda x: x.mean(2, keepdim=True).expand(-1, -1, rows, *x.shape[3:])
        of_query = _blocks(query.float().softmax(-1)).unflatten(3, (-1, group))
        out = torch.einsum("bithgd,bhide->bithge", of_query.to(dtype), over(states).to(dtype))
        norm = torch.einsum("bithgd,bhid->bithg", of_query, over(norms))[..., None]
        out = out.float() / torch.where(norm > 0, norm, 1.0)
        return out.flatten(3, 4).flatten(1, 2)[:, : query.shape[1]]


_SIDE = _core.block[0]


def _blocks(x):
    """(batch, sequence, ..) -> (batch, blocks, 128, ..), padded with zeros."""
    padding = (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % _SIDE)
    return functional.pad(x, padding).unflatten(1, (-1, _SIDE))


def _sizes(x):
    """The number of tokens in each block, in float32."""
    tokens = torch.arange(0, x.shape[1], _SIDE, device=x.device)
    return (x.shape[1] - tokens).clamp_max(_SIDE).float()
