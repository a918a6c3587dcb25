"""Hugging Face transformers' interface of attention functions."""

import functools

from ._api import attention
from ._ops import _error

# Names of `attn_implementation`, with the settings of `attention`.
IMPLEMENTATIONS = {
    "sagebwd": {"scheme": "sagebwd"},
    "sagebwd_scores": {"scheme": "sagebwd", "products": "scores"},
    "attn_qat": {"scheme": "attn-qat"},
    "candle_sage": {"scheme": "fpa"},
}


def register_transformers(**implementations):
    """Adds attention implementations to transformers: `AutoModelForCausalLM.from_config(config,
    attn_implementation="sagebwd")`.

    Without arguments: "sagebwd" (the paper's INT8), "sagebwd_scores" (INT8 for Q K^T alone), "attn_qat" (FP4 values) and
    "candle_sage" (16 bit). Each argument adds one more: a name, and the settings of `attention` as a dictionary.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    for name, settings in {**IMPLEMENTATIONS, **implementations}.items():
        AttentionInterface.register(name, functools.partial(_forward, settings))
        AttentionMaskInterface.register(name, flash_attention_mask)


def _forward(settings, module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """transformers' arguments: tensors are (batch, heads, sequence, head_dim), the result (batch, sequence, heads,
    head_dim). A mask marks tokens that are not padding."""
    if attention_mask is not None:
        raise _error(
            "padded batches are not supported in transformers' interface",
            f"a mask of {list(attention_mask.shape)}",
            "batches without padding",
            "pack documents into sequences of equal length, or pass no attention_mask",
        )
    if dropout and module.training:
        raise _error("dropout of probabilities is not supported", dropout, "0.0", "attention_dropout=0.0 in the model's config")
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    window = kwargs.get("sliding_window")
    out = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        causal=causal and query.shape[2] > 1,
        # The window of a configuration counts the query's own token.
        window=(None if window is None else window - 1, None),
        scale=scaling,
        softcap=kwargs.get("softcap") or 0.0,
        sinks=kwargs.get("s_aux"),
        **settings,
    )
    return out, None
