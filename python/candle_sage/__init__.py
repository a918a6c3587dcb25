"""Trainable low-bit attention for PyTorch: INT8 (SageBwd), FP4 (Attn-QAT) and 16 bit, forward and backward.

    import candle_sage
    out = candle_sage.attention(q, k, v, scheme="sagebwd", products="scores", causal=True)

Tensors are (batch, sequence, heads, head_dim). `scaled_dot_product_attention` has the arguments and the order of
dimensions of PyTorch's function. `flash_attn_func` and `flash_attn_varlen_func` have the arguments of FlashAttention's
functions. `register_transformers` adds the schemes to Hugging Face models. `SLA2` is a module that learns to which
blocks of keys a block of queries attends.
"""

from ._api import attention, flash_attn_func, flash_attn_varlen_func, scaled_dot_product_attention
from ._core import has_kernels, schemes
from ._sla2 import SLA2
from ._transformers import register_transformers

__all__ = [
    "SLA2",
    "attention",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "has_kernels",
    "register_transformers",
    "scaled_dot_product_attention",
    "schemes",
]
__version__ = "0.1.0"
