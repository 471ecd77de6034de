"""Print figures of the code itself: ``python -m ci.figures``.

How many frames, files and Python calls a synchronisation takes, how many buckets a model, and how large the library is.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import flexcomm
import flexdemo

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ("flexcomm", "flexdemo")


def frames_to_gather(body: Callable[[], object]) -> list[str]:
    """Return our own functions between ``body`` and the transport's gather, the outermost first."""
    found: list[list[str]] = []

    def trace(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "all_gather" and "/transport/" in frame.f_code.co_filename:
            names, one = [], frame.f_back
            while one is not None:
                if any(f"/{package}/" in one.f_code.co_filename for package in LIBRARY):
                    names.append(one.f_code.co_qualname if hasattr(one.f_code, "co_qualname") else one.f_code.co_name)
                one = one.f_back
            found.append(names[::-1])

    sys.setprofile(trace)
    try:
        body()
    finally:
        sys.setprofile(None)
    return found[0]


def calls_and_files(body: Callable[[], object]) -> tuple[int, set[str]]:
    """Return how many Python functions ``body`` calls, and the library's files they are in, kernels not counted."""
    counted: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            counted[frame.f_code.co_filename] += 1

    sys.setprofile(trace)
    try:
        body()
    finally:
        sys.setprofile(None)
    files = {
        str(Path(name).relative_to(ROOT))
        for name in counted
        if name.startswith(str(ROOT / "flexcomm")) and "/kernels/" not in name
    }
    return sum(counted.values()), files


def gpt2_shapes() -> list[tuple[int, ...]]:
    n = 768
    block = [(n,), (n,), (n, 3 * n), (3 * n,), (n, n), (n,), (n,), (n,), (n, 4 * n), (4 * n,), (4 * n, n), (n,)]
    return [(50257, n), (1024, n), *(shape for _ in range(12) for shape in block), (n,), (n,)]


def main() -> None:
    with flexcomm.connect() as world:
        x, compressor = torch.randn(16, 16), flexcomm.demo(k=32)

        def sync() -> None:
            flexcomm.hierarchical_sync(x, compressor, world=world)

        for _ in range(3):
            sync()
        calls, files = calls_and_files(sync)
        frames = frames_to_gather(sync)
        print(f"Python calls of a 1 KiB sync: {calls}")
        print(f"files of flexcomm that it passes: {len(files)}")
        print(f"frames from hierarchical_sync to the gather: {len(frames)}: {' > '.join(frames)}")
        param = torch.nn.Parameter(x.clone())
        optimizer = flexdemo.FlexDeMo([param], world=world)

        def step() -> None:
            param.grad = torch.ones_like(param)
            optimizer.step()

        for _ in range(3):
            step()
        frames = frames_to_gather(step)
        print(f"frames from FlexDeMo.step to the gather: {len(frames)}: {' > '.join(frames)}")
    specs = [flexcomm.TensorSpec(str(i), shape, torch.float32) for i, shape in enumerate(reversed(gpt2_shapes()))]
    print(f"buckets of GPT-2 124M at 16 MiB: {len(flexcomm.fill_buckets(specs, 16 << 20))}")
    for package in LIBRARY:
        sources = [path for path in (ROOT / package).rglob("*") if path.suffix in (".py", ".cu", ".h")]
        print(f"{package}: {len(sources)} files, {sum(len(path.read_text().splitlines()) for path in sources)} lines")
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for contract in contracts:
        print(f"import layers, {contract['name']}: {len(contract['layers'])}")


if __name__ == "__main__":
    main()
