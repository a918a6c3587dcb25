"""SLA2 against its definition in float64."""

import pytest
import torch

import candle_sage
from candle_sage import SLA2
from reference import attention as exact
from reference import inputs, relative

FORMS = [
    dict(causal=True, blocks=1),
    dict(causal=True, blocks=2, nearest=1, tail="complement"),
    dict(causal=True, blocks=2, alpha="constant"),
    dict(causal=True, blocks=1, tail=None),
    dict(causal=False, blocks=2, tail="complement", alpha="constant"),
    dict(causal=False, blocks=1),
]


def definition(module, q, k, v, selected):
    """Over all pairs of queries and keys, in float64."""
    group, keys = q.shape[2] // k.shape[2], k.shape[1]
    sparse = exact(q, k, v, causal=module.causal, blocks=selected)
    if module.tail is None:
        return sparse
    of_key = (k.double() if module.causal else k.double() - k.double().mean(1, keepdim=True)).softmax(-1)
    token = torch.arange(keys, device=q.device)
    candidate = token[None] // 128 < token[:, None] // 128 if module.causal else torch.ones(keys, keys, dtype=torch.bool, device=q.device)
    seen = selected.repeat_interleave(group, 1)[:, :, token // 128][..., token // 128] & candidate
    exactly, left = seen.sum(-1), (candidate & ~seen).sum(-1)
    if module.causal:
        exactly = exactly + token % 128 + 1
    tail = candidate if module.tail == "past" else candidate & ~seen
    of_key, value = (x.repeat_interleave(group, 2) for x in (of_key, v.double()))
    weights = torch.einsum("bihd,bjhd->bhij", q.double().softmax(-1), of_key) * tail
    linear = torch.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdim=True).clamp_min(1e-300), value)
    odds = module.theta.double()[:, None] + (torch.log(exactly / left) if module.alpha == "count" else torch.zeros_like(left))
    a = torch.where(left > 0, odds.sigmoid(), 1.0).transpose(1, 2)[..., None]
    return a * sparse + (1 - a) * linear


def module_of(heads, head_dim, device, scheme="fpa", **form):
    module = SLA2(*heads, head_dim, scheme, **form).to(device)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for matrices in (module.query_router, module.key_router):
            matrices += 0.3 * torch.randn(matrices.shape, generator=generator).to(device)
        module.theta.copy_(torch.randn(heads[0], generator=generator))
    return module


@pytest.mark.parametrize("form", FORMS)
def test_output_and_gradients_follow_float64(form, device, dtypes):
    """With unquantized attention. A gradient in 16 bit has the roundings of 16 bit."""
    for dtype in dtypes:
        q, k, v, grad = inputs(2, (330, 330), (4, 2), 64, dtype, device)
        module = module_of((4, 2), 64, device, **form)
        selected = module.select(q, k)
        results = []
        for call in (module, lambda *x: definition(module, *x, selected)):
            for x in (q, k, v, module.theta):
                x.grad = None
            out = call(q, k, v)
            out.backward(grad.to(out.dtype))
            results.append([out.detach(), q.grad, k.grad, v.grad, *([module.theta.grad] if module.tail else [])])
        assert results[0][0].dtype == dtype
        bound = 1e-5 if dtype == torch.float32 else 0.02
        for got, want in zip(*results, strict=True):
            assert relative(got, want.double()) < bound, (form, dtype)


@pytest.mark.parametrize("causal", [False, True])
def test_the_router_selects_the_largest_scores(causal, device):
    q, k, _, _ = inputs(2, (330, 330), (4, 2), 64, torch.float32, device)
    module = module_of((4, 2), 64, device, causal=causal, blocks=1, pool=8)
    selected = module.select(q.to(torch.bfloat16), k.to(torch.bfloat16))
    q, k = (x.to(torch.bfloat16).double() for x in (q, k))
    for batch in range(2):
        for head in range(2):
            for block in range(3):
                first, last = block * 128, min(block * 128 + 128, 330)
                tokens = slice(max(first - 7, 0), first + 1) if causal else slice(first, last)
                mean = q[batch, tokens, 2 * head : 2 * head + 2].mean((0, 1))
                keys = [k[batch, at * 128 : min(at * 128 + 128, 330), head].mean(0) for at in range(block if causal else 3)]
                scores = [(module.query_router[head].double() @ mean) @ (module.key_router[head].double() @ key) for key in keys]
                want = torch.zeros(3, dtype=torch.bool)
                if scores:
                    want[torch.stack(scores).argmax()] = True
                assert torch.equal(selected[batch, head, block].cpu(), want)


def test_the_router_learns_from_dense_attention(device):
    """The loss is the cross-entropy of the scores with dense attention's mass, and gradients reach only the router."""
    q, k, v, _ = inputs(1, (330, 330), (2, 1), 64, torch.float32, device)
    for causal in (False, True):
        module = module_of((2, 1), 64, device, causal=causal, blocks=1)
        loss = module.router_loss(q, k)
        loss.backward()
        assert q.grad is None and module.theta.grad is None
        assert all(matrices.grad.abs().max() > 0 for matrices in (module.query_router, module.key_router))
        logits = torch.einsum("bihd,bjd->bhij", q.double(), k[:, :, 0].double()) / 8
        seen = torch.ones(330, 330, dtype=torch.bool, device=device)
        seen = seen.tril() if causal else seen
        p = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        mass = torch.stack([torch.stack([p[..., i : i + 128, j : j + 128].sum() for j in (0, 128, 256)]) for i in (0, 128, 256)])
        candidates = torch.ones(3, 3, dtype=torch.bool, device=device)
        candidates = candidates.tril(-1) if causal else candidates
        mass = mass * candidates
        scores = module._scores(q, k)[0, 0].double().masked_fill(~candidates, -1e30)
        want = -(mass * scores.log_softmax(-1)).sum() / mass.sum()
        assert abs(loss.item() - want.item()) < 1e-5


def test_later_tokens_change_nothing(device, dtypes):
    """With a causal mask and unquantized attention: a run on the first tokens gives the same rows."""
    q, k, v, _ = inputs(1, (400, 400), (2, 1), 64, dtypes[0], device)
    module = module_of((2, 1), 64, device, causal=True, blocks=1)
    whole = module(q, k, v)
    for length in (1, 128, 200, 300):
        part = module(*(x[:, :length] for x in (q, k, v)))
        assert relative(part, whole[:, :length].double()) < (1e-2 if device.type == "cuda" else 1e-5)


def test_as_many_blocks_as_there_are_is_dense_attention(device, dtypes):
    q, k, v, _ = inputs(1, (300, 300), (2, 2), 64, dtypes[0], device)
    for causal in (False, True):
        out = SLA2(2, 2, 64, blocks=3, causal=causal).to(device)(q, k, v)
        assert relative(out, candle_sage.attention(q, k, v, causal=causal).double()) < (1e-5 if device.type == "cpu" else 1e-2)


@pytest.mark.parametrize("scheme", ["sagebwd", "attn-qat"])
def test_selected_blocks_run_in_a_scheme(scheme, device, dtypes):
    q, k, v, grad = inputs(1, (300, 300), (2, 1), 64, dtypes[0], device)
    exactly, low = (module_of((2, 1), 64, device, name, causal=True, blocks=1)(q, k, v) for name in ("fpa", scheme))
    assert 0.001 < relative(low, exactly.double()) < 0.25
    low.backward(grad)
    assert all(torch.isfinite(x.grad).all() and x.grad.abs().max() > 0 for x in (q, k, v))


def test_it_compiles_and_runs_under_autocast(device, dtypes):
    q, k, v, _ = inputs(1, (300, 300), (2, 1), 64, dtypes[0], device)
    module = module_of((2, 1), 64, device, causal=True, blocks=1)
    compiled = torch.compile(module, fullgraph=True)
    assert relative(compiled(q, k, v), module(q, k, v).double()) < (1e-5 if device.type == "cpu" else 1e-2)
    with torch.autocast(device.type, torch.bfloat16):
        assert module(q, k, v).dtype == torch.bfloat16


def test_what_does_not_fit_is_an_error():
    for arguments, message in [
        (dict(tail="all"), "unknown tail"),
        (dict(alpha=2), "unknown alpha"),
        (dict(blocks=0), "blocks is too small"),
        (dict(nearest=1), "without a causal mask"),
        (dict(nearest=5, causal=True), "0 to 4"),
        (dict(pool=0, causal=True), "pool is too small"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            SLA2(2, 1, 64, **arguments)
        assert "hint:" in str(error.value)
    with pytest.raises(ValueError, match="not a multiple of key_heads"):
        SLA2(3, 2, 64)
    module, x = SLA2(2, 2, 64, causal=True), torch.zeros(1, 8, 2, 64)
    with pytest.raises(ValueError, match="does not fit this SLA2"):
        module(x, x[..., :32], x)
    with pytest.raises(ValueError, match="as many queries as keys"):
        module(x[:, :4], x, x)
