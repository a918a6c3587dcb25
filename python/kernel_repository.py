"""Converts a wheel to the layout of a kernel repository for Hugging Face's `kernels` library.

    maturin build --release --features cuda
    python kernel_repository.py ../target/wheels/candle_sage-*.whl --out candle-sage --archs 8.0,8.6,8.9,9.0a,10.0a,12.0a

    kernel = kernels.get_local_kernel(pathlib.Path("candle-sage/build"))
    out = kernel.attention(q, k, v, scheme="sagebwd", causal=True)

The wheel does not link PyTorch or CUDA's libraries, so one copy serves every PyTorch from 2.4 on and every CUDA 12 or
13. `kernels` looks for a separate build variant for each major version of CUDA, and for the CPU. Python 3.9, which
`kernels` also asks for, is not supported.
"""

import argparse
import base64
import json
import pathlib
import zipfile
from hashlib import sha256

PYTORCH = "torch-stable-abi24"
BACKENDS = {"cpu": {"type": "cpu"}, "cu120": {"type": "cuda"}, "cu130": {"type": "cuda"}}


def contents(wheel):
    """The package's files by their paths in it, and the version."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("candle_sage/")]
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        version = next(line.split(": ")[1] for line in archive.read(metadata).decode().splitlines() if line.startswith("Version: "))
        return {name.removeprefix("candle_sage/"): archive.read(name) for name in names}, version


def with_own_namespace(files):
    """Renames the operators' namespace, because a process may load several versions of a kernel."""
    digest = sha256(b"".join(name.encode() + data for name, data in sorted(files.items()))).hexdigest()[:10]
    namespace, old = f"_candle_sage_{digest}", b'_NAMESPACE = "candle_sage"\n'
    assert files["_ops.py"].count(old) == 1, "_ops.py does not define _NAMESPACE as expected"
    own = files["_ops.py"].replace(old, f'_NAMESPACE = "{namespace}"\n'.encode())
    # Older versions of `kernels` import a folder with the kernel's name.
    compatible = b"from .. import *  # noqa: F403\nfrom .. import __all__  # noqa: F401\n"
    return namespace, {**files, "_ops.py": own, "candle_sage/__init__.py": compatible}


def write(files, namespace, version, folder, backend):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    hashes = {name: base64.b64encode(sha256(data).digest()).decode() for name, data in sorted(files.items())}
    metadata = {
        "id": namespace,
        "name": "candle-sage",
        "version": int(version.split(".")[0]),
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": hashes},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=pathlib.Path, help="a wheel of this package for Linux on x86-64")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the folder of the repository, which must not exist yet")
    parser.add_argument("--archs", required=True, help="CUDA architectures of the wheel's kernels; empty for a wheel without kernels")
    arguments = parser.parse_args()
    if not arguments.wheel.name.endswith("x86_64.whl"):
        parser.error(f"{arguments.wheel.name} is not a wheel for x86-64: its name does not end in x86_64.whl")
    archs = [arch for arch in arguments.archs.split(",") if arch]
    files, version = contents(arguments.wheel)
    namespace, files = with_own_namespace(files)
    arguments.out.mkdir(parents=True)
    for name, backend in BACKENDS.items():
        if backend["type"] == "cuda" and not archs:
            continue
        of = {**backend, "archs": archs} if backend["type"] == "cuda" else backend
        write(files, namespace, version, arguments.out / "build" / f"{PYTORCH}-{name}-x86_64-linux", of)
    print(f"{arguments.out}: {', '.join(path.name for path in sorted((arguments.out / 'build').iterdir()))}")


if __name__ == "__main__":
    main()
