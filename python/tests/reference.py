"""Attention in float64, and inputs for it."""

import torch


def inputs(batch, lengths, heads, head_dim, dtype, device, seed=0, value_dim=None):
    """Query, key, value and the output's gradient, as leaves: (batch, sequence, heads, head_dim)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length, heads, channels):
        x = torch.randn(batch, length, heads, channels, generator=generator)
        return x.to(dtype).to(device)

    (queries, keys), (query_heads, key_heads), value_dim = lengths, heads, value_dim or head_dim
    q, k, v = draw(queries, query_heads, head_dim), draw(keys, key_heads, head_dim), draw(keys, key_heads, value_dim)
    return *(x.requires_grad_() for x in (q, k, v)), draw(queries, query_heads, value_dim)


def visible(queries, keys, causal, window, device):
    """Which keys a query sees: positions are aligned at the end."""
    position = torch.arange(queries, device=device)[:, None] + (keys - queries)
    key = torch.arange(keys, device=device)[None, :]
    left, right = window
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        right = 0
    if right is not None:
        seen &= key <= position + right
    if left is not None:
        seen &= key >= position - left
    return seen


def attention(q, k, v, causal=False, window=(None, None), scale=None, softcap=0.0, sinks=None, alibi_slopes=None, blocks=None, return_lse=False):
    """The definition, in float64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    logits = q @ k.transpose(2, 3) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    queries, keys = logits.shape[2:]
    if alibi_slopes is not None:
        position = torch.arange(queries, device=q.device)[:, None] + (keys - queries)
        distance = (position - torch.arange(keys, device=q.device)).abs()
        logits = logits - alibi_slopes.double()[:, None, None] * distance
    logits = logits.masked_fill(~visible(queries, keys, causal, window, q.device), -torch.inf)
    if blocks is not None:
        blocks = blocks | torch.eye(*blocks.shape[2:], dtype=torch.bool, device=q.device) if causal else blocks
        seen = blocks.repeat_interleave(group, 1).repeat_interleave(128, 2).repeat_interleave(128, 3)
        logits = logits.masked_fill(~seen[:, :, :queries, :keys], -torch.inf)
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(q.shape[0], -1, queries, 1)
        logits = torch.cat((logits, column), dim=3)
    # A query that sees no key has an output of zeros.
    probabilities = torch.softmax(logits, dim=3).nan_to_num(0.0)
    if sinks is not None:
        probabilities = probabilities[..., :-1]
    out = (probabilities @ v).transpose(1, 2)
    return (out, logits.logsumexp(dim=3)) if return_lse else out


def relative(got, exact):
    """The 2-norm of the error, relative to the 2-norm of the exact value."""
    return ((got.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()
