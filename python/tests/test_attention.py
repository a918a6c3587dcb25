"""Output and gradients against float64, for every scheme, and PyTorch's own checks of the operators."""

import pytest
import torch

import candle_sage
from reference import attention as exact
from reference import inputs, relative

# Settings, and bounds of the relative error of output and gradients for normally distributed inputs. The error of INT8
# is 1 % to 3 % (arXiv 2603.02170, Table 1), of FP4 13 % to 20 % (measured here). Unquantized attention only has
# rounding errors.
SCHEMES = {
    "fpa": ({"scheme": "fpa"}, 0.01),
    "sagebwd": ({"scheme": "sagebwd"}, 0.04),
    "kv": ({"scheme": "sagebwd", "smoothing": "kv"}, 0.04),
    "scores": ({"scheme": "sagebwd", "products": "scores", "key_mean": "sample-64"}, 0.04),
    "attn-qat": ({"scheme": "attn-qat"}, 0.25),
}
SHAPES = [((1, 1), (1, 1), 64), ((65, 65), (2, 1), 64), ((130, 200), (4, 2), 40), ((300, 300), (2, 2), 128)]


def both(call, tensors, grad):
    for x in tensors:
        x.grad = None
    out = call(*tensors)
    out.backward(grad.to(out.dtype))
    return [out.detach(), *(x.grad for x in tensors)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_output_and_gradients_follow_float64(name, causal, device, dtypes):
    settings, bound = SCHEMES[name]
    for dtype in dtypes:
        for lengths, heads, head_dim in SHAPES:
            q, k, v, grad = inputs(2, lengths, heads, head_dim, dtype, device)
            got = both(lambda *x: candle_sage.attention(*x, causal=causal, **settings), (q, k, v), grad)
            want = both(lambda *x: exact(*x, causal=causal), (q, k, v), grad)
            for result, reference in zip(got, want, strict=True):
                assert result.dtype == dtype and result.shape == reference.shape
                if lengths[0] > 1:
                    assert relative(result, reference.double()) < bound, (name, dtype, lengths, head_dim)
                else:
                    assert torch.isfinite(result).all()


def test_attn_qat_computes_what_its_values_say(device, dtypes):
    """If FP4 represents the inputs exactly, only the probabilities are rounded."""
    q, k, v, _ = inputs(1, (64, 64), (2, 2), 64, dtypes[-1], device)
    grid = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=device)
    to_grid = lambda x: (grid[(x.detach().float().abs()[..., None] - grid).abs().argmin(-1)] * x.detach().sign()).to(x.dtype)
    # The largest value of each group of 16 is 6, so that its scale is 1.
    q, k, v = (to_grid(x) for x in (q, k, v))
    for x in (q, k):
        x[..., ::16] = 6.0
    v[:, ::16] = 6.0
    got = candle_sage.attention(q * 0.0625, k, v, scheme="attn-qat")
    assert relative(got, exact(q * 0.0625, k, v)) < 0.1


@pytest.mark.parametrize("name", ["fpa", "scores"])
def test_strides_packing_windows_and_logits(name, device, dtypes):
    settings, bound = SCHEMES[name]
    plain = {**settings, **({"smoothing": "none"} if name != "fpa" else {})}
    if name != "fpa":
        plain.pop("key_mean")
    dtype = dtypes[-1]
    q, k, v, grad = inputs(2, (130, 130), (4, 2), 64, dtype, device)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    for extra in ({"window": (40, 10)}, {"window": (20, 0)}, {"softcap": 5.0}, {"alibi_slopes": slopes}, {"scale": 0.3}):
        got = both(lambda *x: candle_sage.attention(*x, **plain, **extra), (q, k, v), grad)
        want = both(lambda *x: exact(*x, **extra), (q, k, v), grad)
        for result, reference in zip(got, want, strict=True):
            assert relative(result, reference.double()) < bound, extra
    # Strided views give bit-identical results to contiguous tensors.
    dense = both(lambda *x: candle_sage.attention(*x, deterministic=True, **settings), (q, k, v), grad)
    views = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    viewed = both(lambda *x: candle_sage.attention(*x, deterministic=True, **settings), views, grad)
    assert all(torch.equal(a, b) for a, b in zip(dense, viewed, strict=True))
    # Each packed document attends only to itself.
    packed = [x.detach()[:1].clone().requires_grad_() for x in (q, k, v)]
    lengths = [0, 1, 64, 130]
    got = both(lambda *x: candle_sage.attention(*x, causal=True, cu_seqlens_q=lengths, **settings), packed, grad[:1])
    for first, end in zip(lengths, lengths[1:], strict=False):
        document = [x.detach()[:, first:end].clone().requires_grad_() for x in packed]
        want = both(lambda *x: exact(*x, causal=True), document, grad[:1, first:end])
        for result, reference in zip(got, want, strict=True):
            if end - first > 1:
                assert relative(result[:, first:end], reference.double()) < bound


def test_sinks_have_a_gradient(device, dtypes):
    dtype = dtypes[-1]
    q, k, v, grad = inputs(2, (70, 70), (4, 2), 64, dtype, device)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device, requires_grad=True)
    got = both(lambda *x: candle_sage.attention(*x[:3], "fpa", causal=True, sinks=x[3]), (q, k, v, sinks), grad)
    want = both(lambda *x: exact(*x[:3], causal=True, sinks=x[3]), (q, k, v, sinks), grad)
    for result, reference in zip(got, want, strict=True):
        assert relative(result, reference.double()) < 0.01


def test_the_functions_of_other_libraries(device, dtypes):
    dtype = dtypes[-1]
    q, k, v, _ = inputs(2, (96, 96), (4, 4), 64, dtype, device)
    ours = candle_sage.attention(q, k, v, "fpa", causal=True)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    sdpa = candle_sage.scaled_dot_product_attention(*heads_first, is_causal=True, scheme="fpa")
    torchs = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
    assert torch.equal(sdpa.transpose(1, 2), ours) and relative(sdpa, torchs.double()) < 0.01
    assert torch.equal(candle_sage.flash_attn_func(q, k, v, causal=True, scheme="fpa"), ours)
    flat = [x[0] for x in (q, k, v)]
    lengths = torch.tensor([0, 96], dtype=torch.int32)
    varlen = candle_sage.flash_attn_varlen_func(*flat, lengths, lengths, 96, 96, causal=True, scheme="fpa")
    assert torch.equal(varlen, ours[0])


@pytest.mark.parametrize("lengths", [None, [0, 5, 64]])
@pytest.mark.parametrize("with_lse", [False, True])
def test_operators_pass_pytorchs_checks(with_lse, lengths, device, dtypes):
    from candle_sage._ops import encode

    text = encode("sagebwd", {"smoothing": "none"}, True, (None, None), None, 0.0, True)
    q, k, v, _ = inputs(1, (64, 64), (2, 1), 64, dtypes[-1], device)
    lengths = None if lengths is None else torch.tensor(lengths)
    check = lambda tests, keep, *x: torch.library.opcheck(
        torch.ops.candle_sage.attention.default, (*x, None, None, None, text, lengths, lengths, with_lse, keep), test_utils=tests
    )
    check(("test_schema", "test_autograd_registration", "test_faketensor"), True, q, k, v)
    # `test_aot_dispatch_static` compares a compiled call with an eager call. `keep` is false, so that the results do
    # not include the state for the backward, whose padding is undefined. `test_compiled_without_graph_breaks` compares
    # the gradients.
    if not with_lse:
        check("test_aot_dispatch_static", False, q.detach(), k.detach(), v.detach())


@pytest.mark.parametrize("name", ["fpa", "sagebwd", "attn-qat"])
def test_log_sum_exps(name, device, dtypes):
    settings, bound = {"scheme": name, **({"smoothing": "none"} if name == "sagebwd" else {})}, SCHEMES[name][1]
    q, k, v, grad = inputs(2, (130, 200), (4, 2), 64, dtypes[-1], device)
    grad_lse = torch.randn(2, 4, 130, generator=torch.Generator().manual_seed(7)).to(device)
    call = lambda *x: candle_sage.attention(*x, causal=True, return_lse=True, **settings)

    def gradients(f, *grads):
        out, lse = f(q, k, v)
        kept = [(x, grad) for x, grad in zip((out, lse), grads, strict=True) if grad is not None]
        loss = sum((x * grad.to(x.dtype)).sum() for x, grad in kept)
        return [out, lse, *torch.autograd.grad(loss, (q, k, v), allow_unused=True)]

    for grads in ((grad, grad_lse), (grad, None), (None, grad_lse)):
        got = gradients(call, *grads)
        want = gradients(lambda *x: exact(*x, causal=True, return_lse=True), *grads)
        assert got[1].dtype == torch.float32 and got[1].shape == (2, 4, 130)
        for result, reference in zip(got, want, strict=True):
            if reference is None:  # the log-sum-exp alone does not depend on the values
                assert not result.any()
            else:
                assert relative(result, reference.double()) < bound
    # With packed documents, a lazily negated gradient (`_neg_view`) gives the results of a negated copy.
    one = [x.detach()[:1, :130].clone().requires_grad_() for x in (q, k, v)]
    lengths = [0, 1, 64, 130]
    _, lse = candle_sage.attention(*one, causal=True, return_lse=True, cu_seqlens_q=lengths, **settings)
    negative, plain = (torch.autograd.grad(lse, one[0], x, retain_graph=True)[0] for x in (torch._neg_view(grad_lse[:1]), -grad_lse[:1]))
    assert torch.equal(negative, plain) or device.type == "cuda" and relative(negative, plain.double()) < 1e-2
    for first, end in zip(lengths, lengths[1:], strict=False):
        _, of_document = exact(*(x.detach()[:, first:end] for x in one), causal=True, return_lse=True)
        assert relative(lse[:, :, first:end], of_document) < bound or end - first == 1
    # Two sets of keys, merged.
    with torch.no_grad():
        halves = [candle_sage.attention(q, k[:, part], v[:, part], return_lse=True, **settings) for part in (slice(64), slice(64, None))]
        weights = torch.stack([lse for _, lse in halves]).softmax(0).transpose(2, 3)[..., None]
        merged = sum(weight * out for weight, (out, _) in zip(weights, halves, strict=True))
        assert relative(merged, exact(q, k, v)) < bound
    for wrong in (
        lambda: candle_sage.attention(q, k, v, "sagebwd", return_lse=True),
        lambda: candle_sage.scaled_dot_product_attention(q, k, v, return_lse=True),
    ):
        with pytest.raises(ValueError, match="hint:"):
            wrong()


def test_lengths_with_the_most_tiles():
    from candle_sage._lengths import _most_tiles

    generator = torch.Generator().manual_seed(3)
    for documents in (1, 2, 5, 70):
        for tokens in (0, 1, 3, 64, 65, 130, 1000):
            most = _most_tiles(torch.zeros(documents + 1), tokens)
            assert len(most) == documents + 1 and most[0] == 0 and most[-1] == tokens
            for _ in range(20):
                cuts = sorted(torch.randint(tokens + 1, (documents - 1,), generator=generator).tolist())
                for tile in (2, 16, 64, 128):
                    tiles = lambda cu: sum(-(-(b - a) // tile) for a, b in zip(cu, cu[1:], strict=False))
                    assert tiles([0, *cuts, tokens]) <= tiles(most)


def test_compiled_once_for_documents_of_any_length(device, dtypes):
    from torch._dynamo.testing import CompileCounterWithBackend

    q, k, v, grad = inputs(1, (200, 200), (2, 1), 64, dtypes[-1], device)
    call = lambda cu, *x: candle_sage.attention(*x, "sagebwd", causal=True, cu_seqlens_q=cu, deterministic=True)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=False)
    for cu in ([0, 64, 128, 200], [0, 1, 2, 200], [0, 65, 130, 200], [0, 0, 0, 200]):
        eager = both(lambda *x: call(cu, *x), (q, k, v), grad)
        traced = both(lambda *x: compiled(torch.tensor(cu), *x), (q, k, v), grad)
        assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True)), cu
    assert counter.frame_count == 1
    # Lengths that change between forward and backward.
    cu = torch.tensor([0, 64, 128, 200])
    out = compiled(cu, q, k, v)
    cu.copy_(torch.tensor([0, 1, 2, 200]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(grad)
    # A list is a constant of the compiled code.
    traced = both(lambda *x: torch.compile(call, fullgraph=True, backend="aot_eager")([0, 65, 130, 200], *x), (q, k, v), grad)
    eager = both(lambda *x: call([0, 65, 130, 200], *x), (q, k, v), grad)
    assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))


def test_compiled_without_graph_breaks(device, dtypes):
    q, k, v, grad = inputs(1, (64, 64), (2, 1), 64, dtypes[-1], device)

    def block(q, k, v):
        return candle_sage.attention(q * 2, k, v, "sagebwd", causal=True, deterministic=True) + 1

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    eager = both(block, (q, k, v), grad)
    assert all(torch.equal(a, b) for a, b in zip(eager, both(compiled, (q, k, v), grad), strict=True))


def test_checkpointing_and_autocast(device, dtypes):
    q, k, v, grad = inputs(1, (64, 64), (2, 1), 64, dtypes[-1], device)
    call = lambda *x: candle_sage.attention(*x, causal=True, deterministic=True)
    again = lambda *x: torch.utils.checkpoint.checkpoint(call, *x, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(both(call, (q, k, v), grad), both(again, (q, k, v), grad), strict=True))
    floats = [x.detach().float() for x in (q, k, v)]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert candle_sage.attention(*floats).dtype == torch.bfloat16


def test_errors_say_what_is_allowed(device, dtypes):
    q, k, v, grad = inputs(1, (64, 64), (2, 1), 64, dtypes[-1], device)
    wrong = [
        (lambda: candle_sage.attention(q, k, v, "int8"), "fpa, sagebwd, attn-qat"),
        (lambda: candle_sage.attention(q, k, v, "sagebwd", value_groups="tokens"), "no such setting"),
        (lambda: candle_sage.attention(q, k, v, "sagebwd", products="most"), "hint:"),
        (lambda: candle_sage.attention(q[0], k, v), "four dimensions"),
        (lambda: candle_sage.attention(q, k[..., :32], v), "hint:"),
        (lambda: candle_sage.attention(q, k, v.double()), "element type"),
        (lambda: candle_sage.attention(*(x.double() for x in (q, k, v))), "float64"),
        (lambda: candle_sage.attention(q, k, v, "sagebwd", sinks=torch.zeros(2, device=device)), "smoothed keys"),
        (lambda: candle_sage.attention(q, k, v, "fpa", sinks=torch.zeros(3, device=device)), "query head"),
        (lambda: candle_sage.scaled_dot_product_attention(q, k, v, attn_mask=q), "mask"),
        (lambda: candle_sage.flash_attn_func(q, k, v, dropout_p=0.1), "dropout"),
    ]
    for call, words in wrong:
        with pytest.raises(ValueError, match=words) as caught:
            call()
        assert "hint:" in str(caught.value), caught.value
    out = candle_sage.attention(q, k, v)
    (dq,) = torch.autograd.grad(out, q, grad, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        dq.sum().backward()


def test_a_cuda_graph_replays(device, dtypes):
    if device.type != "cuda":
        pytest.skip("needs a GPU: run with --device cuda")
    q, k, v, grad = inputs(1, (200, 200), (2, 1), 64, dtypes[0], device)
    call = lambda: both(lambda *x: candle_sage.attention(*x, causal=True, deterministic=True), (q, k, v), grad)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        eager = [x.clone() for x in call()]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for x in captured:
        x.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))


def test_another_stream_and_thread(device, dtypes):
    """Kernels run on the calling thread's current stream, and so after the slow work on that stream."""
    import threading

    q, k, v, grad = inputs(1, (64, 64), (2, 1), 64, dtypes[0], device)
    run = lambda *x: both(lambda *x: candle_sage.attention(*x, "sagebwd", causal=True, deterministic=True), x, grad)
    here, there = [x.clone() for x in run(q, k, v)], []

    def on_a_stream():
        if device.type == "cuda":
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(10**8)
                late = [(x.detach() * 1).requires_grad_() for x in (q, k, v)]
                there.extend(run(*late))
                torch.cuda.current_stream().synchronize()
        else:
            there.extend(run(q, k, v))

    if device.type == "cuda":
        torch.cuda.synchronize()
    thread = threading.Thread(target=on_a_stream)
    thread.start()
    thread.join()
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("widths", [(128, 64), (64, 128)])
def test_values_of_another_width(name, widths, device, dtypes):
    settings, bound = SCHEMES[name]
    q, k, v, grad = inputs(2, (130, 130), (4, 2), widths[0], dtypes[-1], device, value_dim=widths[1])
    got = both(lambda *x: candle_sage.attention(*x, causal=True, **settings), (q, k, v), grad)
    want = both(lambda *x: exact(*x, causal=True), (q, k, v), grad)
    for result, reference in zip(got, want, strict=True):
        assert result.shape == reference.shape and relative(result, reference.double()) < bound


def test_tensors_that_are_not_plain_memory(device, dtypes):
    q, k, v, grad = (x.detach() for x in inputs(1, (64, 64), (2, 1), 64, dtypes[-1], device))
    call = lambda q: candle_sage.attention(q, k, v, causal=True)
    assert torch.equal(call(torch._neg_view(q)), call(-q))
    assert torch.equal(call(q[:, :, :1].expand(-1, -1, 2, -1)), call(q[:, :, :1].repeat(1, 1, 2, 1)))
    assert candle_sage.attention(*(x.to("meta") for x in (q, k, v))).device.type == "meta"
    leaf = q.clone().requires_grad_()
    call(leaf).backward(torch._neg_view(grad))
    negative, leaf.grad = leaf.grad, None
    call(leaf).backward(-grad)
    assert torch.equal(negative, leaf.grad)
    traced = torch.jit.trace(call, q, check_trace=False)
    assert torch.equal(traced(k.expand_as(q) * 2), call(k.expand_as(q) * 2))


def test_settings_are_read_at_each_call(device, dtypes):
    q, k, v, _ = (x.detach() for x in inputs(1, (64, 64), (2, 1), 64, dtypes[-1], device))
    scale = torch.tensor(0.1)
    first = candle_sage.attention(q, k, v, scale=scale)
    scale.fill_(1.0)
    assert torch.equal(candle_sage.attention(q, k, v, scale=scale), candle_sage.attention(q, k, v, scale=1.0))
    assert not torch.equal(first, candle_sage.attention(q, k, v, scale=1.0))
    with pytest.raises(ValueError, match="True, False"):
        candle_sage.attention(q, k, v, "attn-qat", requantized_p=1)
    assert candle_sage.attention(q, k, v, "attn-qat", requantized_p=True).shape == q.shape


def test_what_has_no_derivative_is_an_error(device, dtypes):
    q, k, v, _ = (x.detach() for x in inputs(1, (64, 64), (2, 1), 64, dtypes[-1], device))
    learned = torch.nn.Parameter(torch.tensor(0.1))
    for call in (
        lambda: candle_sage.attention(q, k, v, scale=learned),
        lambda: candle_sage.attention(q, k, v, alibi_slopes=torch.ones(2, device=device, requires_grad=True)),
        lambda: candle_sage.attention(q, k, v, is_causal=True),
        lambda: candle_sage.attention(q, k, v, cu_seqlens_k=[0, 64]),
        lambda: candle_sage.attention(q, k, v, window=8),
        lambda: candle_sage.attention(q, k, v, "sagebwd", products="scores;smoothing=none"),
        lambda: candle_sage.attention(q, k, v, "sagebwd", products=["scores"]),
        lambda: candle_sage.attention(q, None, v),
    ):
        with pytest.raises(ValueError, match="hint:"):
            call()
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(lambda q: candle_sage.attention(q, k, v), (q,), (q,))


def test_messages_are_in_pythons_words(device, dtypes):
    q, k, v, _ = (x.detach() for x in inputs(1, (64, 64), (2, 1), 64, dtypes[-1], device))
    for call in (
        lambda: candle_sage.attention(q, k, v, "sagebwd", softcap=30.0),
        lambda: candle_sage.attention(q, k, v, "sagebwd", sinks=torch.zeros(2, device=device)),
        lambda: candle_sage.attention(q, k, v, "sagebwd", value_groups="tokens"),
        lambda: candle_sage.attention(q, k, v, cu_seqlens_q=[0, 5]),
        lambda: candle_sage.attention(q, k[:, :, :0], v),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert "::" not in str(caught.value) and "`." not in str(caught.value), caught.value


def test_the_current_device_stays(device, dtypes):
    if torch.cuda.device_count() < 2 or device.type != "cuda":
        pytest.skip("needs two GPUs: run with --device cuda")
    results = []
    for other in ("cuda:0", "cuda:1"):
        q, k, v, grad = inputs(1, (200, 200), (2, 1), 64, dtypes[0], torch.device(other))
        results.append(both(lambda *x: candle_sage.attention(*x, "sagebwd", deterministic=True), (q, k, v), grad))
        assert torch.cuda.current_device() == 0
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", SCHEMES)
def test_selected_blocks(name, causal, device, dtypes):
    settings, bound = SCHEMES[name]
    # The last blocks of queries and keys are partial.
    q, k, v, grad = inputs(2, (450, 450), (4, 2), 64, dtypes[-1], device)
    blocks = torch.rand(2, 2, 4, 4, generator=torch.Generator().manual_seed(1)) < 0.5
    blocks = (blocks | torch.eye(4, dtype=torch.bool)).to(device)
    call = lambda *x: candle_sage.attention(*x, causal=causal, blocks=blocks, **settings)
    got, want = (both(f, (q, k, v), grad) for f in (call, lambda *x: exact(*x, causal=causal, blocks=blocks)))
    assert all(relative(x, y.double()) < bound for x, y in zip(got, want, strict=True))
    torch.compiler.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(call, fullgraph=True)(q, k, v), call(q, k, v))
    with pytest.raises(ValueError, match="blocks of queries"):
        candle_sage.attention(q, k, v, causal=causal, blocks=blocks[:, :, :3], **settings)
    if not causal and device.type == "cpu":
        with pytest.raises(ValueError, match="sees nothing"):
            candle_sage.attention(q, k, v, blocks=torch.zeros_like(blocks), **settings)
    every = torch.ones_like(blocks)
    dense = candle_sage.attention(q, k, v, causal=causal, **settings)
    assert relative(candle_sage.attention(q, k, v, causal=causal, blocks=every, **settings), dense.double()) < bound


def test_the_type_of_schemes_names_all():
    from typing import get_args

    from candle_sage._api import Scheme

    assert list(get_args(Scheme)) == candle_sage._core.schemes()
