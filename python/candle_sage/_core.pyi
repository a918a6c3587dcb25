from collections.abc import Sequence

has_kernels: bool
block: tuple[int, int]

_Tensor = tuple[int, Sequence[int], Sequence[int]]
_Layout = tuple[Sequence[int], Sequence[int]]
_Documents = tuple[Sequence[int], Sequence[int]] | None
_Memory = tuple[int, int]
_Others = tuple[int, int, _Memory]

class Settings:
    def __new__(
        cls,
        scheme: str,
        settings: dict[str, str],
        causal: bool,
        window: tuple[int | None, int | None],
        scale: float | None,
        softcap: float,
        deterministic: bool,
    ) -> Settings: ...

def schemes() -> list[str]: ...
def forward_cpu(
    settings: Settings, packing: _Documents, element: str, inputs: Sequence[_Tensor], others: _Others, out: int, lse: int
) -> None: ...
def backward_cpu(
    settings: Settings,
    packing: _Documents,
    element: str,
    inputs: Sequence[_Tensor],
    others: _Others,
    dout: _Tensor,
    dlse: int,
    gradients: Sequence[int],
    dsinks: int,
) -> None: ...
class Call:
    state: int
    forward_scratch: int
    backward_scratch: int
    def __new__(
        cls,
        settings: Settings,
        packing: _Documents,
        element: str,
        inputs: Sequence[_Layout],
        others: tuple[bool, bool, int | None],
        keep: bool,
        lse: bool,
        device: int,
    ) -> Call: ...
    def forward(
        self,
        stream: int,
        tensors: Sequence[int],
        others: _Others,
        results: tuple[int, int],
        state: _Memory,
        scratch: _Memory,
    ) -> None: ...
    def backward(
        self,
        stream: int,
        tensors: Sequence[int],
        others: _Others,
        out: int,
        dout: tuple[int, _Layout],
        dlse: int,
        state: _Memory,
        gradients: tuple[Sequence[int], int],
        scratch: _Memory,
    ) -> None: ...
