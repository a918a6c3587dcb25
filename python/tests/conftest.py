import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))


def pytest_addoption(parser):
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where the tests run; cuda needs a GPU")


@pytest.fixture
def device(request):
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def dtypes(device):
    """The element types that attention supports on the device."""
    on_gpu = [torch.bfloat16, torch.float16]
    return on_gpu if device.type == "cuda" else [torch.float32, *on_gpu]
