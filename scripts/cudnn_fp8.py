"""cuDNN's FP8 attention (E4M3, head_dim 128 on Hopper) as a PyTorch function, through cuDNN's Python frontend
(pip install nvidia-cudnn-frontend). Run as a script, this file prints the errors of output and gradients.

Query, key, value and the output's gradient are cast from 16 bit, and output and gradients are cast back, as a 16-bit
model needs. Scales are constants that suit normal inputs, so no maximum is computed. A training run would have to
compute maxima, which takes more time.
"""
import functools

import cudnn
import torch

E4M3 = torch.float8_e4m3fn
# P is at most 1.
SCALE_OF_P = 256.0


@functools.cache
def _scalar(value):
    return torch.full((1, 1, 1, 1), value, device="cuda")


@functools.cache
def _handle():
    return cudnn.create_handle()


class _Graph:
    """A graph whose tensors are (batch, heads, sequence, head_dim), stored as (batch, sequence, heads, head_dim)."""

    def __init__(self, shape):
        types = {"io_data_type": cudnn.data_type.FP8_E4M3, "intermediate_data_type": cudnn.data_type.FLOAT, "compute_data_type": cudnn.data_type.FLOAT}
        self.graph, self.given, (b, n, h, d) = cudnn.pygraph(**types, handle=_handle()), [], shape
        self.codes = {"dim": [b, h, n, d], "stride": [n * h * d, d, h * d, 1], "data_type": cudnn.data_type.FP8_E4M3}
        self.rows = {"dim": [b, h, n, 1], "stride": [h * n, n, 1, 1], "data_type": cudnn.data_type.FLOAT}
        self.one = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1], "data_type": cudnn.data_type.FLOAT}

    def input(self, of):
        self.given.append(self.graph.tensor(**of))
        return self.given[-1]

    def output(self, tensor, of):
        tensor.set_output(True).set_dim(of["dim"]).set_stride(of["stride"]).set_data_type(of["data_type"])
        self.given.append(tensor)

    def build(self):
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A])
        self.graph.check_support()
        self.graph.build_plans()
        self.workspace = self.graph.get_workspace_size()

    def run(self, *tensors):
        cudnn.set_stream(handle=_handle(), stream=torch.cuda.current_stream().cuda_stream)
        workspace = torch.empty(max(self.workspace, 1), device="cuda", dtype=torch.uint8)
        self.graph.execute(dict(zip(self.given, tensors, strict=True)), workspace, handle=_handle())


@functools.cache
def _forward(shape, causal):
    g = _Graph(shape)
    q, k, v = (g.input(g.codes) for _ in range(3))
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    scales = {name: g.input(g.one) for name in names}
    settings = {"is_inference": False, "attn_scale": shape[-1] ** -0.5, "use_causal_mask": causal}
    out, stats, *largest = g.graph.sdpa_fp8(q=q, k=k, v=v, **scales, **settings)
    for tensor, of in ((out, g.codes), (stats, g.rows), *((x, g.one) for x in largest)):
        g.output(tensor, of)
    g.build()
    return g


@functools.cache
def _backward(shape, causal):
    g = _Graph(shape)
    tensors = {name: g.input(g.codes) for name in ("q", "k", "v", "o", "dO")} | {"stats": g.input(g.rows)}
    names = "descale_q descale_k descale_v descale_o descale_dO descale_s descale_dP scale_s scale_dQ scale_dK scale_dV scale_dP".split()
    scales = {name: g.input(g.one) for name in names}
    *gradients, dq, dk, dv, dp = g.graph.sdpa_fp8_backward(**tensors, **scales, attn_scale=shape[-1] ** -0.5, use_causal_mask=causal)
    for tensor, of in (*((x, g.codes) for x in gradients), *((x, g.one) for x in (dq, dk, dv, dp))):
        g.output(tensor, of)
    g.build()
    return g


class Attention(torch.autograd.Function):
    """Attention on (batch, sequence, heads, head_dim), for as many key heads as query heads."""

    @staticmethod
    def forward(ctx, query, key, value, causal):
        codes = [x.to(E4M3) for x in (query, key, value)]
        out, largest = torch.empty_like(codes[0]), [torch.empty(1, 1, 1, 1, device="cuda") for _ in range(2)]
        b, n, h, _ = query.shape
        stats = torch.empty(b, h, n, 1, device="cuda")
        one = _scalar(1.0)
        scales = one, one, one, _scalar(1 / SCALE_OF_P), _scalar(SCALE_OF_P), one
        _forward(tuple(query.shape), causal).run(*codes, *scales, out, stats, *largest)
        ctx.save_for_backward(*codes, out, stats)
        ctx.causal = causal
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx, dout):
        *tensors, stats = ctx.saved_tensors
        gradients = [torch.empty_like(tensors[0]) for _ in range(3)]
        largest = [torch.empty(1, 1, 1, 1, device="cuda") for _ in range(4)]
        one, of_p = _scalar(1.0), (_scalar(1 / SCALE_OF_P), _scalar(SCALE_OF_P))
        scales = one, one, one, one, one, of_p[0], one, of_p[1], one, one, one, one
        graph = _backward(tuple(tensors[0].shape), ctx.causal)
        graph.run(*tensors, dout.contiguous().to(E4M3), stats, *scales, *gradients, *largest)
        return *(x.to(dout.dtype) for x in gradients), None


def errors(batch=1, sequence=1024, heads=4):
    """The errors of output and gradients for normal inputs, relative to attention in f32."""
    inputs = [torch.randn(batch, sequence, heads, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    results = []
    for exact in (True, False):
        *leaves, dout = ((x.float() if exact else x).clone().requires_grad_() for x in inputs)
        if exact:
            out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), is_causal=True).transpose(1, 2)
        else:
            out = Attention.apply(*leaves, True)
        out.backward(dout.detach())
        results.append([out.detach().float(), *(x.grad.float() for x in leaves)])
    return {name: ((b - a).norm() / a.norm()).item() for name, a, b in zip(("O", "dQ", "dK", "dV"), *results, strict=True)}


if __name__ == "__main__":
    print(", ".join(f"{name} {error:.4f}" for name, error in errors().items()))
