"""Rules of the house that a linter cannot express. The layers are in pyproject.toml, and `make check` holds them."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import flexcomm
import flexdemo

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for room in ("flexcomm", "flexdemo", "bench") for path in (ROOT / room).rglob("*.py"))

PACKAGES_OF_LIBRARIES = {
    "mpi4py": ("flexcomm/transport/", "flexcomm/bootstrap/"),
    "numba": ("flexcomm/kernels/",),
    "cupy": ("flexcomm/kernels/",),
    "cupyx": ("flexcomm/kernels/",),
}
LAZY = tuple(PACKAGES_OF_LIBRARIES)

# mpi4py's lower-case verbs pickle what they are given.
PICKLING_VERBS = {
    "send", "bsend", "ssend", "isend", "ibsend", "issend", "recv", "irecv", "mrecv", "sendrecv", "bcast", "gather",
    "scatter", "allgather", "alltoall", "reduce", "allreduce", "scan", "exscan", "ibcast", "igather", "iscatter",
    "iallgather", "ialltoall", "ireduce", "iallreduce",
}  # fmt: skip


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_libraries(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def without_type_checking_blocks(tree: ast.Module) -> ast.Module:
    class Strip(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | None:
            if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                return None
            return self.generic_visit(node)

    return Strip().visit(tree)  # type: ignore[no-any-return]


def test_foreign_libraries_are_imported_in_their_own_package_only() -> None:
    trespassing = {
        (name_of(path), library)
        for path in SOURCES
        for library in imported_libraries(without_type_checking_blocks(parsed(path))) & PACKAGES_OF_LIBRARIES.keys()
        if not name_of(path).startswith((*PACKAGES_OF_LIBRARIES[library], "bench/"))
    }
    assert not trespassing


def pickling_calls(tree: ast.Module) -> set[str]:
    speaks_mpi = "mpi4py" in imported_libraries(tree)
    found = imported_libraries(tree) & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called, receiver = node.func.attr, ast.unparse(node.func.value)
            may_be_mpi = speaks_mpi and receiver not in ("dist", "torch", "self")
            if called.endswith(("_object", "_object_list", "_objects")) or (called in PICKLING_VERBS and may_be_mpi):
                found.add(f"{receiver}.{called}")
    return found


def test_nothing_is_pickled_on_the_way() -> None:
    assert not {(name_of(path), call) for path in SOURCES for call in pickling_calls(parsed(path))}


def test_calls_that_pickle_are_found() -> None:
    assert pickling_calls(ast.parse("import torch.distributed as dist\ndist.all_gather_object(out, 1)")) == {
        "dist.all_gather_object"
    }
    assert pickling_calls(ast.parse("from mpi4py import MPI\ncomm.bcast(1)\ncomm.Bcast(x)")) == {"comm.bcast"}
    assert pickling_calls(ast.parse("import pickle")) == {"pickle"}


def public_modules() -> list[str]:
    return [
        module.name
        for package in (flexcomm, flexdemo)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]


@pytest.mark.parametrize("package", [flexcomm, flexdemo], ids=lambda package: package.__name__)
def test_all_is_sorted_and_names_everything_public(package) -> None:  # type: ignore[no-untyped-def]
    # Submodules appear as attributes once imported, whether or not they are listed, as flexcomm.gossip is.
    modules = {name.rsplit(".", 1)[1] for name in public_modules()}
    public = {name for name in vars(package) if not name.startswith("_") and name not in modules}
    listed = list(package.__all__)
    # Constants first: the order that ruff sorts into.
    assert listed == sorted(listed, key=lambda name: (not name.isupper(), name))
    assert public == {name for name in listed if not name.startswith("_")} - modules


def test_every_module_imports_and_has_what_its_all_lists() -> None:
    modules = [importlib.import_module(name) for name in public_modules()]
    missing = {
        (module.__name__, name)
        for module in modules
        for name in getattr(module, "__all__", ())
        if not hasattr(module, name)
    }
    assert not missing


def test_one_table_knows_the_kinds_of_devices() -> None:
    """Another kind of device is a row of device.py, so nothing else may name one."""
    naming = {name_of(path) for path in SOURCES if "cuda" in path.read_text()}
    allowed = {
        "flexcomm/device.py",
        # The name of a variable by which people choose how Open MPI moves device memory.
        "flexcomm/transport/mpi.py",
    }
    mine = {name for name in naming if name.startswith("flexcomm/") and not name.startswith("flexcomm/kernels/gpu/")}
    assert mine == allowed


BENEATH_THE_SURFACE = {
    # One message for all private names of torch that are gone.
    "flexdemo/torch_private.py": {"flexcomm.torch_private", "flexcomm.versions"},
    # It times what a rank computes for a bucket, without a world to send it in.
    "flexdemo/predict/measure.py": {"flexcomm.codec", "flexcomm.kernels"},
    # World.agree remembers what ranks agreed on; the parameters they train are compared each time.
    "flexdemo/gradients.py": {"flexcomm.bootstrap.consistency"},
    # States become elements and back, once, on the host: by the reference's transform, which nothing else is to use.
    "flexdemo/checkpoint.py": {"flexcomm.kernels.reference.transform"},
    # Streams and futures of torch's own hooks, which know their devices.
    "flexdemo/hooks/": {"flexcomm.device"},
}


def imported_modules(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
    return names


def test_the_optimizers_use_the_public_surface_of_the_library() -> None:
    """flexdemo is its first user: what it needs, others need. Schedules have a package of their own."""
    used = {
        (name_of(path), module)
        for path in SOURCES
        if name_of(path).startswith("flexdemo/")
        for module in imported_modules(parsed(path))
        if module.startswith("flexcomm.") and not module.startswith("flexcomm.gossip")
    }
    allowed = {(start, module) for start, modules in BENEATH_THE_SURFACE.items() for module in modules}
    beneath = {
        (name, module) for name, module in used if not any(name.startswith(s) and module == m for s, m in allowed)
    }
    assert not beneath
    needless = {(s, m) for s, m in allowed if not any(name.startswith(s) and module == m for name, module in used)}
    assert not needless, "no longer needed: take it off the list"


def test_no_module_is_called_utils() -> None:
    assert not [name_of(path) for path in SOURCES if path.stem in ("utils", "util", "helpers", "misc", "common")]


def test_importing_flexcomm_imports_no_optional_library_and_little_beside_torch() -> None:
    """Counted in modules, which do not depend on the machine; `python -m bench startup` measures the seconds."""
    program = (
        "import sys, torch.distributed; before = set(sys.modules); import flexcomm; print(*{*sys.modules} - before)"
    )
    added = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=ROOT).split()
    assert not {name for name in added if name.split(".")[0] in LAZY}
    foreign = {name for name in added if name.split(".")[0] != "flexcomm"}
    assert len(foreign) <= 5, sorted(foreign)
