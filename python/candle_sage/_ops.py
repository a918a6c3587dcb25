"""The operators `torch.ops.candle_sage`: attention and its backward, for autograd and `torch.compile`."""

import functools

import torch

from . import _core
from ._errors import _error
from ._lengths import _as_tensor, _both, _most_tiles, _packing

# `settings` is a result of `encode`, and `lists` a result of `lists_of`. `cu_seqlens_q` and `cu_seqlens_k` contain the
# index of each packed document's first token, then the number of all tokens. They are tensors, not Python lists, so
# that a traced call accepts documents of any lengths. The results are the output, the log-sum-exps (empty if `with_lse`
# is false), and the state that the forward stores for its backward, as bytes (empty if `keep` is false, and on a CPU).
_FORWARD = (
    "attention(Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor? alibi_slopes, Tensor? lists, str settings, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, bool with_lse, bool keep) -> (Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "attention_backward(Tensor grad, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor state, "
    "Tensor? sinks, Tensor? alibi_slopes, Tensor? lists, str settings, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "bool with_lse) -> (Tensor, Tensor, Tensor, Tensor)"
)

# The namespace of the operators. `kernel_repository.py` gives each copy of the package a different namespace, because a
# process may load several copies.
_NAMESPACE = "candle_sage"

_library = torch.library.Library(_NAMESPACE, "DEF")
_library.define(_FORWARD)
_library.define(_BACKWARD)
_operators = getattr(torch.ops, _NAMESPACE)


def encode(scheme, settings, causal, window, scale, softcap, deterministic):
    """The settings of a call as a string, an argument of the operators. `torch.compile` traces `encode`; `_settings`
    parses the string."""
    # `scale` and `softcap` may be tensors. They are converted to numbers, because `_encoded` caches results by its
    # arguments, and a tensor's value may change between calls.
    scale, softcap = None if scale is None else float(scale), float(softcap)
    plain = lambda value: value if isinstance(value, (str, bool, int)) else str(value)
    words = [x for name in sorted(settings) for x in (name, plain(settings[name]))]
    encode = _encode if torch.compiler.is_compiling() else _encoded
    return encode(scheme, bool(causal), *window, scale, softcap, bool(deterministic), *words)


def _encode(scheme, causal, left, right, scale, softcap, deterministic, *words):
    """`words` are names, each followed by its value."""
    pairs = zip(words[::2], words[1::2], strict=True)
    settings = "".join(f"{name.replace('_', '-')}={_word(value)};" for name, value in pairs)
    left, right = (-1 if n is None else int(n) for n in (left, right))
    text = f"{scheme};{causal};{left};{right};{'' if scale is None else scale};{softcap};{deterministic};{settings}"
    if text.count(";") != 7 + len(words) // 2:
        raise _error("a setting contains a semicolon", text, "names and values without semicolons", "one argument for each setting")
    return text


# Typed, because 1 and True are equal, but encoded differently.
_encoded = functools.lru_cache(maxsize=4096, typed=True)(_encode)


def _word(value):
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


@functools.lru_cache(maxsize=4096)
def _settings(text):
    scheme, causal, left, right, scale, softcap, deterministic, *words, _ = text.split(";")
    settings = dict(word.split("=", 1) for word in words)
    window = tuple(None if n.startswith("-") else int(n) for n in (left, right))
    scale = None if scale == "" else float(scale)
    return _core.Settings(scheme, settings, causal == "True", window, scale, float(softcap), deterministic == "True")


_ELEMENTS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def _element(dtype):
    return _ELEMENTS.get(dtype) or str(dtype).removeprefix("torch.")


def _tensor(x):
    return x.data_ptr(), tuple(x.shape), x.stride()


def _others(sinks, slopes, lists, query):
    """The addresses of sinks, slopes and lists, and the tensors that must stay alive while kernels read them."""
    if sinks is None and slopes is None and lists is None:
        return (0, 0, (0, 0)), None
    for name, x in (("sinks", sinks), ("ALiBi slopes", slopes)):
        if x is not None and (x.shape != (query.shape[2],) or x.device != query.device):
            raise _error(
                f"the {name} do not fit the query",
                f"{list(x.shape)} on {x.device}",
                f"[{query.shape[2]}] on {query.device}",
                "one number for each query head",
            )
    floats = [None if x is None else x.detach().to(torch.float32).contiguous() for x in (sinks, slopes)]
    sinks, slopes = (0 if x is None else x.data_ptr() for x in floats)
    if lists is not None:
        lists = lists.contiguous()
    return (sinks, slopes, (0, 0) if lists is None else (lists.data_ptr(), lists.shape[-1] - 1)), (floats, lists)


def lists_of(blocks, query, key, causal):
    """The lists of a selection: for each key head and block of queries, the number of visible key blocks, then their
    indices, ascending."""
    side = _core.block[0]
    counts = [-(-x.shape[1] // side) for x in (query, key)]
    shape = (query.shape[0], key.shape[2], *counts)
    if blocks.dtype != torch.bool or tuple(blocks.shape) != shape or blocks.device != query.device:
        raise _error(
            "the selected blocks do not fit query and key",
            f"{_element(blocks.dtype)} {list(blocks.shape)} on {blocks.device}",
            f"bool {list(shape)} on {query.device}: (batch, key heads, blocks of queries, blocks of keys)",
            f"a block has {side} tokens",
        )
    if causal:
        # Blocks on the diagonal are always seen, blocks above it never.
        blocks = blocks.tril(-1) | torch.eye(*counts, dtype=torch.bool, device=blocks.device)
    elif blocks.is_cuda:
        # A device assertion, because raising an error here would wait for the device. On a CPU, `Selection` in Rust
        # makes this check.
        torch._assert_async(blocks.any(-1).all(), "candle_sage: a block of queries sees no block of keys")
    order = torch.sort(blocks.to(torch.uint8), dim=-1, descending=True, stable=True).indices
    lists = torch.cat((blocks.sum(-1, keepdim=True), order), -1).to(torch.int32)
    return lists.transpose(0, 1).reshape(shape[1], -1, 1 + counts[1])


def _output_shape(query, value):
    return (*query.shape[:3], value.shape[3])


def _lse_shape(query):
    return (query.shape[0], query.shape[2], query.shape[1])


def _check_gradient(grad, query):
    if grad.dtype != query.dtype or grad.device != query.device:
        raise _error(
            "the output's gradient does not fit the output",
            f"{grad.device} {grad.dtype}",
            f"{query.device} {query.dtype}",
            "convert with `grad.to(out)`",
        )


def _of(x):
    return x.shape, x.stride(), x.dtype, x.device


def _check(query, key, value):
    """Checks the tensors, given as results of `_of`."""
    for name, x in (("key", key), ("value", value)):
        if x[2:] != query[2:]:
            raise _error(
                f"query and {name} differ in device or element type",
                f"{query[3]} {query[2]}, {x[3]} {x[2]}",
                "one device and one of float32 (CPU), float16, bfloat16",
                f"convert with `{name}.to(query)`",
            )
    for name, x in (("query", query), ("key", key), ("value", value)):
        if len(x[0]) != 4:
            raise _error(
                f"{name} does not have four dimensions",
                list(x[0]),
                "(batch, sequence, heads, head_dim)",
                "add a dimension of 1 with `unsqueeze`",
            )


def _make_plan(settings, packing, with_lse, keep, others, query, key, value):
    if not _core.has_kernels:
        raise _error(
            "this build has no kernels for GPUs",
            "tensors on a GPU",
            "tensors on the CPU",
            "build the package with feature `cuda`: `maturin build --release --features cuda`",
        )
    _check(query, key, value)
    layouts = [(tuple(map(int, x[0])), tuple(map(int, x[1]))) for x in (query, key, value)]
    device = torch.cuda.current_device() if query[3].index is None else query[3].index
    with torch.cuda.device(device):
        return _core.Call(_settings(settings), packing, _element(query[2]), layouts, others, keep, with_lse, device)


_planned = functools.lru_cache(maxsize=4096)(_make_plan)
# Packed documents have other lengths in each training step, so plans of earlier steps are rarely used again.
_planned_packed = functools.lru_cache(maxsize=16)(_make_plan)


def _plan(query, key, value, sinks, slopes, lists, settings, packing, with_lse, keep):
    """The plan of a call on a GPU: everything except addresses. Made once per combination of shapes and settings."""
    planned = _planned if packing is None else _planned_packed
    width = None if lists is None else int(lists.shape[-1]) - 1
    return planned(settings, packing, with_lse, keep, (sinks is not None, slopes is not None, width), query, key, value)


def _traced_state(query, key, value, sinks, slopes, lists, settings, cu_seqlens_q, cu_seqlens_k, with_lse, keep):
    """The size of the state of a traced call on a GPU. Shapes are fixed, but lengths of documents are not."""
    of = [(tuple(map(int, x.shape)), tuple(map(int, x.stride())), x.dtype, x.device) for x in (query, key, value)]
    packing = None
    if cu_seqlens_q is not None:
        packing = (_most_tiles(cu_seqlens_q, of[0][0][1]), _most_tiles(cu_seqlens_k, of[1][0][1]))
    return _plan(*of, sinks, slopes, lists, settings, packing, with_lse, keep).state


def _on_device(call):
    """A decorator: makes the device of the first tensor current during the call, then restores the previous device."""

    @functools.wraps(call)
    def on_device(tensor, *rest, **named):
        if torch._C._cuda_getDevice() == tensor.device.index:
            return call(tensor, *rest, **named)
        with torch.cuda.device(tensor.device):
            return call(tensor, *rest, **named)

    return on_device


def _lend(count, device):
    """Memory allocated by PyTorch: the tensor, and its address and size."""
    x = torch.empty(count, dtype=torch.uint8, device=device)
    return x, (x.data_ptr(), count)


@_on_device
def _forward_cuda(query, key, value, sinks, slopes, lists, settings, cu_seqlens_q, cu_seqlens_k, with_lse, keep, state=None):
    """`state`: the size of the state, if it is more than the call needs."""
    packing = _packing(cu_seqlens_q, cu_seqlens_k)
    plan = _plan(_of(query), _of(key), _of(value), sinks, slopes, lists, settings, packing, with_lse, keep)
    others, _alive = _others(sinks, slopes, lists, query)
    device = query.device
    out = torch.empty(_output_shape(query, value), dtype=query.dtype, device=device)
    lse = torch.empty(_lse_shape(query), dtype=torch.float32, device=device) if with_lse else None
    state, lent_state = _lend(plan.state if state is None else state, device)
    _scratch, lent_scratch = _lend(plan.forward_scratch, device) if plan.forward_scratch else (None, (0, 0))
    addresses = query.data_ptr(), key.data_ptr(), value.data_ptr()
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    results = out.data_ptr(), lse.data_ptr() if with_lse else 0
    plan.forward(stream, addresses, others, results, lent_state, lent_scratch)
    return out, lse, state


@_on_device
def _backward_cuda(grad, grad_lse, query, key, value, out, state, sinks, slopes, lists, settings, cu_seqlens_q, cu_seqlens_k, with_lse):
    _check_gradient(grad, query)
    packing = _packing(cu_seqlens_q, cu_seqlens_k)
    plan = _plan(_of(query), _of(key), _of(value), sinks, slopes, lists, settings, packing, with_lse, True)
    # Hooks on saved tensors may return copies: of `out` with other strides, of `state` with another alignment.
    out = out.contiguous()
    state = state if state.data_ptr() % 256 == 0 else state.clone()
    others, _alive = _others(sinks, slopes, lists, query)
    # If channels are not adjacent, the kernels would read them one by one.
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    dlse = 0 if grad_lse is None else grad_lse.data_ptr()
    device = query.device
    _scratch, lent_scratch = _lend(plan.backward_scratch, device)
    gradients = [_without_gaps(x) for x in (query, key, value)]
    dsinks = _no_floats(query) if sinks is None else torch.empty_like(sinks, dtype=torch.float32)
    addresses = query.data_ptr(), key.data_ptr(), value.data_ptr()
    dout = grad.data_ptr(), (grad.shape, grad.stride())
    written = [x.data_ptr() for x in gradients], dsinks.data_ptr()
    lent_state = state.data_ptr(), state.numel()
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    plan.backward(stream, addresses, others, out.data_ptr(), dout, dlse, lent_state, written, lent_scratch)
    return *gradients, dsinks


def _without_gaps(like):
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _no_floats(query):
    return torch.empty(0, dtype=torch.float32, device=query.device)


def _forward_cpu(query, key, value, sinks, slopes, lists, settings, cu_seqlens_q, cu_seqlens_k, with_lse, keep):
    _check(_of(query), _of(key), _of(value))
    others, _alive = _others(sinks, slopes, lists, query)
    tensors = [x.contiguous() for x in (query, key, value)]
    out = query.new_empty(_output_shape(query, value))
    packing = _packing(cu_seqlens_q, cu_seqlens_k)
    inputs = [_tensor(x) for x in tensors]
    lse = query.new_empty(_lse_shape(query), dtype=torch.float32) if with_lse else None
    results = out.data_ptr(), lse.data_ptr() if with_lse else 0
    _core.forward_cpu(_settings(settings), packing, _element(query.dtype), inputs, others, *results)
    return out, lse, query.new_empty(0, dtype=torch.uint8)


def _backward_cpu(grad, grad_lse, query, key, value, out, state, sinks, slopes, lists, settings, cu_seqlens_q, cu_seqlens_k, with_lse):
    _check_gradient(grad, query)
    others, _alive = _others(sinks, slopes, lists, query)
    tensors = [x.contiguous() for x in (query, key, value)]
    grad = grad.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    dlse = 0 if grad_lse is None else grad_lse.data_ptr()
    gradients = [x.new_empty(x.shape) for x in tensors]
    dsinks = _no_floats(query) if sinks is None else torch.empty_like(sinks, dtype=torch.float32)
    packing = _packing(cu_seqlens_q, cu_seqlens_k)
    inputs = [_tensor(x) for x in tensors]
    addresses = [x.data_ptr() for x in gradients]
    _core.backward_cpu(
        _settings(settings), packing, _element(query.dtype), inputs, others, _tensor(grad), dlse, addresses, dsinks.data_ptr()
    )
    return *gradients, dsinks


def _forward_of_operator(query, *inputs):
    # `state` must have the size that `torch.compile` computes before it knows the lengths of documents.
    more = {"state": _traced_state(query, *inputs)} if query.is_cuda else {}
    out, lse, state = (_forward_cuda if query.is_cuda else _forward_cpu)(query, *inputs, **more)
    return out, _no_floats(query) if lse is None else lse, state


for _device, _backward in (("CUDA", _backward_cuda), ("CPU", _backward_cpu)):
    _library.impl("attention", _forward_of_operator, _device)
    _library.impl("attention_backward", _backward, _device)


@torch.library.register_fake(f"{_NAMESPACE}::attention", lib=_library)
def _(query, key, value, *rest):
    *_, with_lse, _ = rest
    _check(_of(query), _of(key), _of(value))
    state = _traced_state(query, key, value, *rest) if query.device.type == "cuda" else 0
    lse = query.new_empty(_lse_shape(query), dtype=torch.float32) if with_lse else _no_floats(query)
    return query.new_empty(_output_shape(query, value)), lse, query.new_empty(state, dtype=torch.uint8)


@torch.library.register_fake(f"{_NAMESPACE}::attention_backward", lib=_library)
def _(grad, grad_lse, query, key, value, out, state, sinks, *_):
    dsinks = _no_floats(query) if sinks is None else torch.empty_like(sinks, dtype=torch.float32)
    return *(x.new_empty(x.shape) for x in (query, key, value)), dsinks


def _keep_inputs(ctx, inputs, output):
    query, key, value, sinks, slopes, lists, settings, cu_seqlens_q, cu_seqlens_k, with_lse, _ = inputs
    out, lse, state = output
    # Saves lengths that are tensors, because PyTorch notices if saved tensors change before the backward.
    tensors = [x if isinstance(x, torch.Tensor) else None for x in (cu_seqlens_q, cu_seqlens_k)]
    ctx.save_for_backward(query, key, value, out, state, sinks, slopes, lists, *tensors)
    ctx.lengths = (cu_seqlens_q, cu_seqlens_k) if tensors[0] is None else None
    ctx.settings, ctx.with_lse = settings, with_lse
    without_gradient = (state,) if lse is None or with_lse else (lse, state)
    ctx.mark_non_differentiable(*without_gradient)
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad, grad_lse, _):
    if grad is None and grad_lse is None:
        return (None,) * 11
    *tensors, sinks, slopes, lists, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    lengths = (cu_seqlens_q, cu_seqlens_k) if ctx.lengths is None else ctx.lengths
    grad = torch.zeros_like(tensors[3]) if grad is None else grad
    given = [x for x in (grad, grad_lse) if x is not None]
    # With create_graph=True, calls the operator `attention_backward`, so that a second backward raises an error.
    if torch.is_grad_enabled() or _traced(*given, *tensors[:3]):
        backward, lengths = _operators.attention_backward, [_as_tensor(x) for x in lengths]
    else:
        backward = _backward_cuda if grad.is_cuda else _backward_cpu
    dq, dk, dv, dsinks = backward(grad, grad_lse, *tensors, sinks, slopes, lists, ctx.settings, *lengths, ctx.with_lse)
    dsinks = None if sinks is None else dsinks.to(sinks.dtype)
    return dq, dk, dv, dsinks, *(None,) * 7


def _no_second_gradient(*_):
    raise RuntimeError("attention has no second derivative\n  hint:    call `backward` without `create_graph=True`")


torch.library.register_autograd(f"{_NAMESPACE}::attention", _gradients, setup_context=_keep_inputs, lib=_library)
torch.library.register_autograd(
    f"{_NAMESPACE}::attention_backward", _no_second_gradient, setup_context=lambda *_, **__: None, lib=_library
)


class _Attention(torch.autograd.Function):
    """The operator without the dispatcher, whose autograd needs 100 microseconds of host time per call."""

    @staticmethod
    def forward(ctx, *inputs):
        output = (_forward_cuda if inputs[0].is_cuda else _forward_cpu)(*inputs)
        _keep_inputs(ctx, inputs, output)
        return output

    backward = staticmethod(_gradients)


def _traced(*tensors):
    """Whether a call must go through PyTorch's dispatcher: calls are traced, or tensors are not plain memory."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any(
            type(x) not in _PLAIN or not (x.is_cuda or x.is_cpu) or x.is_neg() or x._is_zerotensor() for x in tensors
        )
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def attention(query, key, value, sinks, slopes, lists, settings, cu_seqlens_q, cu_seqlens_k, *rest):
    """The output and the log-sum-exps of attention. The arguments are those of the operator `attention`, but cumulative
    lengths may also be sequences of integers."""
    if torch.autograd.forward_ad._current_level >= 0 or _differentiates_forward():
        raise RuntimeError("attention has no forward-mode derivative\n  hint:    use reverse mode: `backward` or `torch.autograd.grad`")
    heads = [x for x in (sinks, slopes, lists) if x is not None]
    if _traced(query, key, value, *heads):
        lengths = _as_tensor(cu_seqlens_q), _as_tensor(cu_seqlens_k)
        return _operators.attention(query, key, value, sinks, slopes, lists, settings, *lengths, *rest)[:2]
    if cu_seqlens_q is not None:
        cu_seqlens_q, cu_seqlens_k = _both(cu_seqlens_q, cu_seqlens_k)
    inputs = query, key, value, sinks, slopes, lists, settings, cu_seqlens_q, cu_seqlens_k, *rest
    if rest[-1]:
        return _Attention.apply(*inputs)[:2]
    return (_forward_cuda if query.is_cuda else _forward_cpu)(*inputs)[:2]


def _differentiates_forward():
    """Whether `torch.func.jvp` is active."""
    if torch.compiler.is_compiling():
        return False
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return interpreter is not None and interpreter.key() == torch._C._functorch.TransformType.Jvp
