"""Hugging Face transformers' interface of attention functions."""

import functools

import torch

from ._api import attention
from ._ops import _error, _settings, encode

# Names of `attn_implementation`, with the settings of `attention`.
IMPLEMENTATIONS = {
    "sagebwd": {"scheme": "sagebwd"},
    "sagebwd_scores": {"scheme": "sagebwd", "products": "scores", "key_mean": "sample-64"},
    "attn_qat": {"scheme": "attn-qat"},
    "candle_sage": {"scheme": "fpa"},
}

# What the mask function returns for any other mask: `_forward` then needs the lengths of packed documents.
_OTHER_MASK = torch.empty(0, dtype=torch.bool)


def register_transformers(**implementations: dict) -> None:
    """Adds attention implementations to transformers: `AutoModelForCausalLM.from_config(config,
    attn_implementation="sagebwd_scores")`, or `model.set_attn_implementation("candle_sage")` for a model that exists.

    Without arguments: "sagebwd" (the paper's INT8), "sagebwd_scores" (INT8 for Q K^T alone, `key_mean="sample-64"`),
    "attn_qat" (FP4 values) and "candle_sage" (16 bit). Each argument adds one more: a name, and a dictionary with `scheme`
    and its settings. Masks must be causal, bidirectional or sliding windows; documents can be packed with
    `DataCollatorWithFlattening(return_flash_attn_kwargs=True)`. Other masks, padding and static caches are errors.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name, settings in {**IMPLEMENTATIONS, **implementations}.items():
        scheme = dict(settings)
        _settings(encode(scheme.pop("scheme", "fpa"), scheme, False, (None, None), None, 0.0, False))
        AttentionInterface.register(name, functools.partial(_forward, settings))
        AttentionMaskInterface.register(name, _mask)


def _mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None, local_size=None, **_):
    """None for a mask that `_forward` computes by itself; the positions of padding; or `_OTHER_MASK`."""
    if kv_offset + kv_length != q_offset + q_length:
        raise _error(
            "a static cache is not supported",
            f"{kv_length} keys, of which {q_offset + q_length - kv_offset} are filled",
            "keys up to the last query",
            "the default cache: leave out cache_implementation",
        )
    if attention_mask is not None:
        attention_mask = attention_mask[:, -kv_length:]
        if attention_mask.shape[1] != kv_length or not bool(attention_mask.all()):
            return attention_mask
    # A traced model is not checked: the comparison would break its graph.
    if torch.compiler.is_compiling() or mask_function is None or _is_ours(
        mask_function, local_size, q_offset + q_length, kv_offset, kv_offset + kv_length
    ):
        return None
    return _OTHER_MASK


def _is_ours(mask_function, local_size, queries, first_key, keys):
    """Whether a mask is causal or bidirectional, and within a window if there is one, at some positions."""
    query = torch.unique(torch.linspace(max(0, queries - 512), queries - 1, 48).long())[:, None]
    key = torch.unique(torch.cat((torch.linspace(first_key, keys - 1, 64).long(), query[:, 0].clamp(first_key, keys - 1))))[None]
    zero = torch.zeros((), dtype=torch.long)
    try:
        seen = mask_function(zero, zero, query, key).expand(query.shape[0], key.shape[1])
    except (RuntimeError, IndexError):
        # It reads a tensor of the model's device: documents, or images.
        return False
    causal = key <= query
    window = torch.ones_like(causal)
    if local_size is not None:
        causal_window, both = key > query - local_size, (key - query).abs() <= local_size
        return torch.equal(seen, causal & causal_window) or torch.equal(seen, both)
    return torch.equal(seen, causal) or torch.equal(seen, window)


def _forward(settings, module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """transformers' arguments: tensors are (batch, heads, sequence, head_dim), the result (batch, sequence, heads,
    head_dim)."""
    lengths = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if attention_mask is not None and not (attention_mask.numel() == 0 and lengths[0] is not None):
        padded = attention_mask.dim() == 2
        raise _error(
            "padded batches are not supported" if padded else "this model's attention mask is not supported",
            f"a mask of {list(attention_mask.shape)}" if padded else "neither causal nor a sliding window",
            "batches without padding; causal and bidirectional masks, and sliding windows",
            "pack documents with DataCollatorWithFlattening(return_flash_attn_kwargs=True), or attn_implementation=\"sdpa\"",
        )
    if kwargs.get("position_bias") is not None:
        raise _error("a bias of positions is not supported", "position_bias", "none", 'attn_implementation="sdpa"')
    if dropout and module.training:
        raise _error(
            "dropout of probabilities is not supported", dropout, "0.0", "set the attention dropout of the model's config to 0"
        )
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    window = kwargs.get("sliding_window")
    # The window of a configuration counts the query's own token.
    window = (None, None) if window is None else (window - 1, window - 1)
    out = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        causal=causal and query.shape[2] > 1,
        window=window,
        scale=scaling,
        softcap=kwargs.get("softcap") or 0.0,
        sinks=kwargs.get("s_aux"),
        cu_seqlens_q=lengths[0],
        cu_seqlens_k=lengths[1],
        **settings,
    )
    return out, None
