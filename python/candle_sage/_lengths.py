"""The cumulative lengths of packed documents."""

import torch

from ._errors import _error


def _lengths_of(cu_seqlens):
    """Cumulative lengths as a tuple of integers. Reading a tensor on a GPU waits for the GPU."""
    lengths = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else list(cu_seqlens)
    if any(isinstance(n, (float, list)) or n < 0 for n in lengths):
        raise _error("lengths of documents are not cumulative lengths", lengths, "integers from 0 on", "[0, 20, 64] are two documents")
    return tuple(int(n) for n in lengths)


def _as_tensor(cu_seqlens):
    """Cumulative lengths as a tensor, as the operators need them, or None."""
    return cu_seqlens if cu_seqlens is None or isinstance(cu_seqlens, torch.Tensor) else torch.tensor(cu_seqlens, device="cpu")


def _both(cu_seqlens_q, cu_seqlens_k):
    """The lengths of queries and keys as tuples. Lengths that are the same object are read once."""
    queries = _lengths_of(cu_seqlens_q)
    return queries, queries if cu_seqlens_k is cu_seqlens_q else _lengths_of(cu_seqlens_k)


def _packing(cu_seqlens_q, cu_seqlens_k):
    """An operator's lengths, or None. Tuples are results of `_both`, and need no other check."""
    if cu_seqlens_q is None:
        return None
    return (cu_seqlens_q, cu_seqlens_k) if isinstance(cu_seqlens_q, tuple) else _both(cu_seqlens_q, cu_seqlens_k)


def _most_tiles(cu_seqlens, tokens):
    """Cumulative lengths with the same numbers of documents and tokens whose state needs the most memory: every
    document except the last has one token, so that the documents have as many tiles as possible."""
    documents = cu_seqlens.shape[0] - 1
    single = min(max(documents - 1, 0), tokens)
    return (*range(single + 1), *[tokens] * (documents - single))
