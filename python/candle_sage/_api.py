"""The public attention functions."""

from collections.abc import Sequence
from typing import Literal

import torch

from . import _ops
from ._errors import _error
from ._ops import encode

Scheme = Literal["fpa", "sagebwd", "attn-qat"]
Window = tuple[int | None, int | None]
Lengths = Sequence[int] | torch.Tensor


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scheme: Scheme = "fpa",
    *,
    causal: bool = False,
    window: Window = (None, None),
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    blocks: torch.Tensor | None = None,
    deterministic: bool = False,
    cu_seqlens_q: Lengths | None = None,
    cu_seqlens_k: Lengths | None = None,
    return_lse: bool = False,
    **settings: str | bool | int,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention, `softmax(scale Q K^T) V`, with gradients of query, key and value.

    Tensors are (batch, sequence, heads, head_dim) with any strides: float16 or bfloat16, and on a CPU also float32. For
    (batch, heads, sequence, head_dim) use `scaled_dot_product_attention`: a wrong order is not detected. The number of
    query heads may be a multiple of the number of key heads. A causal mask is aligned at the end: the last query sees
    every key. Under autocast, query, key and value are cast to the autocast type.

    In INT8 and FP4, tokens share scales and means: even with a causal mask, later tokens change an output by rounding
    errors. If outputs must not depend on later tokens at all, use "fpa".

    scheme: "fpa" (unquantized, in the type of the tensors), "sagebwd" (INT8) or "attn-qat" (FP4).
    settings: settings of the scheme, by name, such as `products="scores"`; docs/pytorch.md has a table.
    causal: whether a query sees only the keys up to its own position.
    window: numbers of keys that a query sees before and after its own position, as in FlashAttention; None or -1: all.
    scale: the factor of the logits; None: 1 / sqrt(head_dim).
    softcap: a logit x becomes `softcap * tanh(x / softcap)`; 0: no soft cap.
    sinks: (query heads): an additional logit per head in the softmax's denominator, without a value, with a gradient.
    alibi_slopes: (query heads): the slopes of ALiBi, without a gradient.
    blocks: (batch, key heads, blocks of queries, blocks of keys), bool: the blocks of 128 keys that each block of 128
        queries sees. Only these blocks are computed. With a causal mask the blocks on the diagonal are always seen;
        without a causal mask each row needs a True: a row without one is an error on a CPU, and a failed device
        assertion on a GPU.
    deterministic: whether gradients have the same bits in every run.
    cu_seqlens_q, cu_seqlens_k: cumulative lengths of packed documents, as in FlashAttention: [0, 20, 64] are two
        documents. The batch size must be 1. Use lists or CPU tensors: tensors on a GPU are copied to the host, which
        waits for the GPU. Under `torch.compile` use tensors, because a list is a constant of the compiled code.
        Compiled code has a fixed number of documents: append empty documents, as in [0, 20, 64, 64, 64].
    return_lse: whether to also return the log-sum-exps of the logits (with soft cap, ALiBi and sinks), over the keys
        that a query sees: (batch, heads, sequence) in float32, with a gradient; -inf where a query sees no key.
        Attention to several sets of keys is the mean of the sets' outputs, weighted by exp(lse); only one of the sets
        may have sinks. Not supported with smoothed keys ("sagebwd" needs smoothing="none") or FP4 matmuls.

    Returns (batch, sequence, heads, head_dim of the values). Errors are `ValueError`s with a hint.
    """
    for name, x in (("query", query), ("key", key), ("value", value), ("sinks", sinks), ("alibi_slopes", alibi_slopes), ("blocks", blocks)):
        if not isinstance(x, torch.Tensor) and (x is not None or name in ("query", "key", "value")):
            raise _error(f"{name} is not a tensor", type(x).__name__, "a torch.Tensor", "`torch.as_tensor` converts numbers")
    for name in settings.keys() & _OTHER_NAMES.keys():
        raise _error(f"`attention` has no argument `{name}`", name, "the arguments of help(candle_sage.attention)", _OTHER_NAMES[name])
    for name, x in (("scale", scale), ("softcap", softcap), ("alibi_slopes", alibi_slopes)):
        if isinstance(x, torch.Tensor) and x.requires_grad:
            raise _error(
                f"{name} does not support gradients", "a tensor that requires a gradient", "a number, or a tensor without a gradient",
                "multiply the query by a learned scale, and pass scale=1.0" if name == "scale" else f"`{name}.detach()`",
            )
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise _error(
            "window is not a pair", window, "(left, right), of numbers or None",
            "with (255, 0) a query sees 255 keys before it and its own",
        )
    if cu_seqlens_k is not None and cu_seqlens_q is None:
        raise _error("cu_seqlens_k needs cu_seqlens_q", "only cu_seqlens_k", "both, or only cu_seqlens_q", "pass cu_seqlens_q")
    narrow = value.shape[-1] if value.dim() == query.dim() and scheme != "fpa" else None
    if narrow is not None and narrow != query.shape[-1]:
        # Only "fpa" has kernels for values whose head_dim differs from the keys'. Padding with zeros is exact.
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        wide = max(narrow, query.shape[-1])
        query, key, value = (torch.nn.functional.pad(x, (0, wide - x.shape[-1])) for x in (query, key, value))
    text = encode(scheme, settings, causal, window, scale, softcap or 0.0, deterministic)
    device = query.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        to = torch.get_autocast_dtype(device)
        query, key, value = (x if x.dtype == torch.float64 else x.to(to) for x in (query, key, value))
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    if blocks is not None and cu_seqlens_q is not None:
        raise _error(
            "selected blocks are not supported with packed documents", "blocks and cu_seqlens_q", "one of them",
            "use a batch of documents of equal length",
        )
    lists = None if blocks is None else _ops.lists_of(blocks, query, key, causal)
    tracked = any(x is not None and x.requires_grad for x in (query, key, value, sinks))
    # On a GPU the log-sum-exps are copied from the state that a forward keeps for its backward.
    keep = return_lse or (torch.is_grad_enabled() and tracked)
    out, lse = _ops.attention(query, key, value, sinks, alibi_slopes, lists, text, cu_seqlens_q, cu_seqlens_k, return_lse, keep)
    out = out if narrow is None or narrow == out.shape[-1] else out[..., :narrow]
    return (out, lse) if return_lse else out


# Arguments of other attention functions, with hints on what to use instead.
_OTHER_NAMES = {
    "is_causal": "causal=True, whose mask is aligned at the last key",
    "softmax_scale": "scale=..",
    "window_size": "window=(left, right)",
    "attn_mask": "causal=True, a window, or packed documents (cu_seqlens_q)",
    "dropout_p": "dropout of probabilities is not supported: leave it out, and train with dropout 0",
    "enable_gqa": "leave it out: the number of query heads may be a multiple of the number of key heads",
    "return_attn_probs": "return_lse=True for the log-sum-exps; probabilities are not stored",
    "return_softmax_lse": "return_lse=True",
    "block_table": "leave it out: paged caches are not supported",
}


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    scheme: Scheme = "fpa",
    **settings: str | bool | int,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with a scheme. Tensors are (.., heads, sequence, head_dim).

    `settings` are the same as for `attention`. Dropout and masks other than `is_causal` are errors. PyTorch aligns a
    causal mask at the first key, but `attention` aligns it at the last key. Therefore `is_causal` needs as many queries
    as keys. The result is a view of (batch, sequence, heads, head_dim): `reshape` works, `view` may not.
    """
    if attn_mask is not None:
        raise _error(
            "an attention mask is not supported", "attn_mask", "None",
            "`is_causal`, a `window` of `attention`, or packed documents (`cu_seqlens_q`) instead of padding",
        )
    _no_dropout(dropout_p)
    if settings.get("return_lse"):
        raise _error("`scaled_dot_product_attention` returns no log-sum-exps", "return_lse", "no return_lse", "use `attention`")
    if query.dim() < 3 or not query.dim() == key.dim() == value.dim():
        raise _error(
            "query, key and value have different numbers of dimensions", [list(x.shape) for x in (query, key, value)],
            "(.., heads, sequence, head_dim)", "add a dimension of 1 with `unsqueeze`",
        )
    if is_causal and query.shape[-2] != key.shape[-2]:
        raise _error(
            "is_causal needs as many queries as keys",
            f"{query.shape[-2]} queries, {key.shape[-2]} keys",
            "equal lengths",
            "for one query with a cache: is_causal=False; otherwise `attention(causal=True)`, whose mask is aligned at the last key",
        )
    if not enable_gqa and query.shape[-3] != key.shape[-3]:
        raise _error(
            "query and key have different numbers of heads", f"{query.shape[-3]}, {key.shape[-3]}", "equal numbers",
            "enable_gqa=True allows a multiple of the key heads",
        )
    outer = query.shape[:-3]
    heads_last = (x.reshape(-1, *x.shape[-3:]).transpose(1, 2) for x in (query, key, value))
    out = attention(*heads_last, scheme, **{"causal": is_causal, "scale": scale, **settings})
    out = out.transpose(1, 2)
    return out.reshape(*outer, *out.shape[1:])


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    *,
    scheme: Scheme = "fpa",
    **settings: str | bool | int,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention's `flash_attn_func` with a scheme. Tensors are (batch, sequence, heads, head_dim)."""
    _no_dropout(dropout_p)
    return attention(
        q, k, v, scheme, causal=causal, window=window_size, scale=softmax_scale, softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=deterministic, **settings,
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    *,
    scheme: Scheme = "fpa",
    **settings: str | bool | int,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention's `flash_attn_varlen_func` with a scheme. Tensors are (tokens, heads, head_dim).

    The host needs the lengths: `cu_seqlens` on a GPU are copied to the host, which waits for the GPU. Lists and CPU
    tensors avoid this. `return_lse=True` also returns the log-sum-exps, (heads, tokens).
    """
    _no_dropout(dropout_p)
    out = attention(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), scheme, causal=causal, window=window_size, scale=softmax_scale,
        softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, **settings,
    )
    return tuple(x.squeeze(0) for x in out) if isinstance(out, tuple) else out.squeeze(0)


def _no_dropout(dropout_p):
    if dropout_p:
        raise _error("dropout of probabilities is not supported", dropout_p, "dropout_p=0.0", "train without it")
