"""The layout for Hugging Face's `kernels` library: two versions in one process."""

import pathlib
import subprocess
import sys
import zipfile

import pytest
import torch

import candle_sage
from reference import inputs


def wheel(folder, version):
    """A wheel of the installed package."""
    package, path = pathlib.Path(candle_sage.__file__).parent, folder / f"candle_sage-{version}-cp310-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in package.glob("*.*"):
            if file.is_file():
                archive.writestr(f"candle_sage/{file.name}", file.read_bytes() + (version.encode() if file.name == "py.typed" else b""))
        archive.writestr(f"candle_sage-{version}.dist-info/METADATA", f"Metadata-Version: 2.4\nName: candle-sage\nVersion: {version}\n")
    return path


def test_kernels_loads_the_layout(tmp_path, device, dtypes):
    kernels = pytest.importorskip("kernels", exc_type=ImportError)
    script = pathlib.Path(__file__).parent.parent / "kernel_repository.py"
    loaded = []
    for version in ("0.1.0", "1.2.0"):
        out = tmp_path / version
        archs = "9.0a" if device.type == "cuda" else ""
        subprocess.run([sys.executable, script, wheel(tmp_path, version), "--out", out, "--archs", archs], check=True)
        loaded.append(kernels.get_local_kernel(out / "build", backend="cpu" if device.type == "cpu" else None))
    assert loaded[0] is not loaded[1] and loaded[0].__file__ != candle_sage.__file__
    q, k, v, grad = inputs(1, (64, 64), (2, 1), 64, dtypes[-1], device)
    want = candle_sage.attention(q, k, v, "sagebwd", causal=True, deterministic=True)
    want = [want, *torch.autograd.grad(want, (q, k, v), grad)]
    for kernel in loaded:
        # The call is compiled, because eager calls do not use the operators in `torch.ops`.
        call = torch.compile(lambda *x, of=kernel: of.attention(*x, "sagebwd", causal=True, deterministic=True), backend="aot_eager")
        got = call(q, k, v)
        assert all(torch.equal(a, b) for a, b in zip(want, [got, *torch.autograd.grad(got, (q, k, v), grad)], strict=True))
