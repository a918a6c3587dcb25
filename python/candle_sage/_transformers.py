"""Attention implementations for Hugging Face transformers."""

import functools

import torch

from ._api import attention
from ._errors import _error
from ._ops import _settings, encode

# Names for `attn_implementation`, with the arguments of `attention` that each name stands for.
IMPLEMENTATIONS = {
    "sagebwd": {"scheme": "sagebwd"},
    "sagebwd_scores": {"scheme": "sagebwd", "products": "scores", "key_mean": "sample-64"},
    "attn_qat": {"scheme": "attn-qat"},
    "candle_sage": {"scheme": "fpa"},
}

# The mask function returns this for an unsupported mask. `_forward` raises an error for it, except with packed
# documents: their lengths replace the mask.
_OTHER_MASK = torch.empty(0, dtype=torch.bool)


def register_transformers(**implementations: dict) -> None:
    """Adds attention implementations to transformers: `AutoModelForCausalLM.from_config(config,
    attn_implementation="sagebwd_scores")`, or `model.set_attn_implementation("candle_sage")` for an existing model.

    Without arguments it adds "sagebwd" (INT8 as in the paper), "sagebwd_scores" (only Q K^T in INT8,
    `key_mean="sample-64"`), "attn_qat" (FP4) and "candle_sage" (unquantized). Each argument adds one more: the
    argument's name is the implementation's name, and its value is a dictionary with `scheme` and the scheme's settings.
    Masks must be causal, bidirectional or sliding windows. Batches may be padded, and documents packed with
    `DataCollatorWithFlattening(return_flash_attn_kwargs=True)`. Other masks and static caches are errors.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name, settings in {**IMPLEMENTATIONS, **implementations}.items():
        scheme = dict(settings)
        _settings(encode(scheme.pop("scheme", "fpa"), scheme, False, (None, None), None, 0.0, False))
        AttentionInterface.register(name, functools.partial(_forward, settings))
        AttentionMaskInterface.register(name, _mask)


def _mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None, local_size=None, **_):
    """None for a mask that `_forward` computes itself; the result of `_with_packing` for padding; otherwise `_OTHER_MASK`."""
    if kv_offset + kv_length != q_offset + q_length:
        raise _error(
            "a static cache is not supported",
            f"{kv_length} keys, of which {q_offset + q_length - kv_offset} are filled",
            "keys up to the last query",
            "the default cache: leave out cache_implementation",
        )
    # Under `torch.compile` the mask function is not checked: `_is_ours` would cause a graph break.
    if not torch.compiler.is_compiling() and mask_function is not None and not _is_ours(
        mask_function, local_size, q_offset + q_length, kv_offset, kv_offset + kv_length
    ):
        return _OTHER_MASK
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, -kv_length:]
    if attention_mask.shape[1] != kv_length:
        return _OTHER_MASK
    return None if bool(attention_mask.all()) else _with_packing(attention_mask, q_length)


def _with_packing(mask, queries):
    """A padding mask with an attribute that `_forward` needs in every layer: the indices of tokens that are not
    padding, and the cumulative lengths of the texts, for queries and for keys."""
    mask = mask.bool()
    mask.packing = [_tokens(mask[:, -queries:]), _tokens(mask)]
    return mask


def _tokens(mask):
    return mask.flatten().nonzero().flatten(), [0, *mask.sum(1).cumsum(0).tolist()]


def _is_ours(mask_function, local_size, queries, first_key, keys):
    """Tests at some positions whether a mask is causal or bidirectional, with the window if there is a window."""
    query = torch.unique(torch.linspace(max(0, queries - 512), queries - 1, 48).long())[:, None]
    key = torch.unique(torch.cat((torch.linspace(first_key, keys - 1, 64).long(), query[:, 0].clamp(first_key, keys - 1))))[None]
    zero = torch.zeros((), dtype=torch.long)
    try:
        seen = mask_function(zero, zero, query, key).expand(query.shape[0], key.shape[1])
    except (RuntimeError, IndexError):
        # A mask function for documents or images reads the model's tensors, and may fail at the tested positions.
        return False
    causal = key <= query
    window = torch.ones_like(causal)
    if local_size is not None:
        causal_window, both = key > query - local_size, (key - query).abs() <= local_size
        return torch.equal(seen, causal & causal_window) or torch.equal(seen, both)
    return torch.equal(seen, causal) or torch.equal(seen, window)


def _forward(settings, module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """Attention with the arguments of transformers: tensors are (batch, heads, sequence, head_dim), the result is
    (batch, sequence, heads, head_dim)."""
    lengths = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    padding = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
    if attention_mask is not None and (padding is None) == (lengths[0] is None):
        raise _error(
            "this model's attention mask is not supported" if padding is None else "padding of packed documents",
            "neither causal nor a sliding window" if padding is None else "a padding mask and cu_seq_lens_q",
            "causal and bidirectional masks, sliding windows, padding",
            "pack documents with DataCollatorWithFlattening(return_flash_attn_kwargs=True), or attn_implementation=\"sdpa\"",
        )
    if kwargs.get("position_bias") is not None:
        raise _error("a position bias is not supported", "position_bias", "none", 'attn_implementation="sdpa"')
    if dropout and module.training:
        raise _error(
            "dropout of probabilities is not supported", dropout, "0.0", "set the attention dropout of the model's config to 0"
        )
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    window = kwargs.get("sliding_window")
    # The window in a model's configuration includes the query's own token.
    window = (None, None) if window is None else (window - 1, window - 1)
    causal = causal and query.shape[2] > 1
    tensors = [x.transpose(1, 2) for x in (query, key, value)]
    if padding is not None:
        (queries, q_lengths), (keys, k_lengths) = getattr(padding, "packing", None) or _with_packing(padding, query.shape[2]).packing
        lengths = q_lengths, k_lengths
        tensors = [x.flatten(0, 1).index_select(0, at)[None] for x, at in zip(tensors, (queries, keys, keys), strict=True)]
    out = attention(
        *tensors,
        causal=causal,
        window=window,
        scale=scaling,
        softcap=kwargs.get("softcap") or 0.0,
        sinks=kwargs.get("s_aux"),
        cu_seqlens_q=lengths[0],
        cu_seqlens_k=lengths[1],
        **settings,
    )
    if padding is not None:
        batch, _, sequence, _ = query.shape
        every = out.new_zeros(batch * sequence, *out.shape[2:])
        out = every.index_copy(0, queries, out[0]).unflatten(0, (batch, sequence))
    return out, None
