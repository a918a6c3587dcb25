"""The functions that models call."""

import torch

from . import _ops
from ._ops import _error, encode


def attention(
    query,
    key,
    value,
    scheme="sagebwd",
    *,
    causal=False,
    window=(None, None),
    scale=None,
    softcap=0.0,
    sinks=None,
    alibi_slopes=None,
    deterministic=False,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    **settings,
):
    """Attention, `softmax(scale Q K^T) V`, with gradients of query, key and value.

    Tensors are (batch, sequence, heads, head_dim) with any strides: on a GPU in float16 or bfloat16, on a CPU in float32
    too. The number of query heads may be a multiple of the number of key heads. A causal mask is aligned at the end: the
    last query sees every key. Under autocast, float32 becomes autocast's type.

    scheme: "fpa" (the type of the tensors), "sagebwd" (INT8) or "attn-qat" (FP4 values).
    settings: those of the scheme, by name. sagebwd: `products` ("paper", "scores", ..), `smoothing` ("none", "k", "qk",
        "kv"), `key_mean` ("all", "sample-64", ..), `granularity`; attn-qat: `smoothing`, `value_groups`, `p_reference`,
        `high_precision_output`, `matched_recomputation`, `requantized_p`, `products`.
    window: keys before and after a query's own position that it sees; None: all.
    softcap: a logit x becomes `softcap * tanh(x / softcap)`; 0: none.
    sinks: a logit of each query head without a value, (query heads); gets a gradient.
    alibi_slopes: (query heads).
    deterministic: whether gradients have the same bits in every run.
    cu_seqlens_q, cu_seqlens_k: the first token of each packed document, and the end, as lists of integers or CPU tensors;
        the batch is then 1.
    """
    text = encode(scheme, settings, causal, window, scale, softcap, deterministic)
    if query.dtype == torch.float32 and torch.is_autocast_enabled(query.device.type):
        to = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(to), key.to(to), value.to(to)
    if cu_seqlens_q is not None:
        cu_seqlens_q = _integers(cu_seqlens_q)
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else _integers(cu_seqlens_k)
    tracked = any(x is not None and x.requires_grad for x in (query, key, value, sinks))
    keep = torch.is_grad_enabled() and tracked
    return _ops.attention(query, key, value, sinks, alibi_slopes, text, cu_seqlens_q, cu_seqlens_k, keep)


def _integers(lengths):
    return [int(n) for n in (lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths)]


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *, scheme="sagebwd", **settings
):
    """`torch.nn.functional.scaled_dot_product_attention` in another scheme: tensors are (batch, heads, sequence, head_dim).

    Masks other than `is_causal` and dropout are errors. PyTorch aligns a causal mask at the first key; with as many
    queries as keys this is the alignment of `attention` too, and otherwise it is an error.
    """
    if attn_mask is not None:
        raise _error(
            "an attention mask is not supported", "attn_mask", "None",
            "`is_causal`, a `window` of `attention`, or packed documents (`cu_seqlens_q`) instead of padding",
        )
    if dropout_p:
        raise _error("dropout of probabilities is not supported", dropout_p, "0.0", "drop out the output instead")
    if is_causal and query.shape[-2] != key.shape[-2]:
        raise _error(
            "a causal mask that starts at the first key needs as many queries as keys",
            f"{query.shape[-2]} queries, {key.shape[-2]} keys",
            "equal lengths",
            "`attention(causal=True)` aligns the mask at the last key, as FlashAttention does",
        )
    if not enable_gqa and query.shape[-3] != key.shape[-3]:
        raise _error(
            "query and key have different numbers of heads", f"{query.shape[-3]}, {key.shape[-3]}", "equal numbers",
            "enable_gqa=True",
        )
    heads_last = (x.transpose(1, 2) for x in (query, key, value))
    return attention(*heads_last, scheme, causal=is_causal, scale=scale, **settings).transpose(1, 2)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, *, scheme="sagebwd", **settings,
):
    """FlashAttention's function of this name in another scheme: tensors are (batch, sequence, heads, head_dim)."""
    _no_dropout(dropout_p)
    return attention(
        q, k, v, scheme, causal=causal, window=window_size, scale=softmax_scale, softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=deterministic, **settings,
    )


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, *, scheme="sagebwd", **settings,
):
    """FlashAttention's function of this name in another scheme: tensors are (tokens, heads, head_dim).

    The host needs the lengths: `cu_seqlens` on a GPU are copied, which waits for the GPU. Lists or CPU tensors are not.
    """
    _no_dropout(dropout_p)
    out = attention(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), scheme, causal=causal, window=window_size, scale=softmax_scale,
        softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, **settings,
    )
    return out.squeeze(0)


def _no_dropout(dropout_p):
    if dropout_p:
        raise _error("dropout of probabilities is not supported", dropout_p, "0.0", "drop out the output instead")
