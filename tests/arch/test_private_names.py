"""Private names of torch and numba occur in a few small modules only, and this is the list of them.

Private is what begins with an underscore, and what only private objects of torch have, which is looked up by
``flexcomm.versions.private``. ``torch._foreach_*`` is exempt: torch's own optimizers are written with it.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from flexcomm.versions import TESTED_ON, TESTED_VERSIONS

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flexcomm", "flexdemo", "bench")
STAND_INS = {"tests/unit/test_versions.py", "tests/unit/test_flexdemo_torch_private.py"}

PRIVATE_NAMES = {
    "flexcomm/kernels/cpu/cache.py": {"_cache", "_rebuild", "_reduce"},  # numba's
    "flexcomm/kernels/cpu/compiler.py": {"_codegen", "_data_layout"},  # numba's
    "flexcomm/stats.py": {"_is_profiler_enabled"},
    "flexcomm/torch_private.py": {
        "_C", "_current_graph_task_id", "_distributed_c10d", "_engine_run_backward", "_execution_engine",
        "_get_backend", "_plugins", "_register_backend", "_set_default_backend", "_set_sequence_number_for_group",
        "_timeout", "queue_callback",
    },
    "flexdemo/torch_private.py": {
        "_all_reduce_hook", "_comm_hook", "_comm_hook_state", "_fsdp_param_groups",
        "_get_fsdp_state", "_handle", "_init_backend", "_post_accumulate_grad_hooks", "_saved_grad_shard", "_version",
        "device", "flat_param", "force_sum_reduction_for_comms", "fsdp_params", "gradient_divide_factor", "mp_policy",
        "padded_sharded_param_size", "reduce_scatter_unused_params", "sharded_param",
    },
    "tests/ranks/backend_laws.py": {"_functional_collectives"},
    "tests/ranks/preload.py": {"_dynamo"},
    "tests/stand_in/device.py": {"_is_in_bad_fork", "_register_device_module"},
    "tests/stand_in/laws.py": {"_set_default_backend"},
    "tests/stand_in/placement.py": {"_device"},
    "tests/unit/test_kernel_cache.py": {"_cache"},  # numba's
    "tests/unit/test_sync_gpu_budgets.py": {"_python_dispatch"},
}  # fmt: skip
NAMED_TUPLE = {"_replace", "_make", "_asdict", "_fields"}
OF_OTHER_LIBRARIES = {"_Environ", "_local_world_size", "_value_"}
"""Of os, of decent-dp, and of enum, which documents it."""
LOOKUPS = {"getattr", "setattr", "hasattr", "delattr", "private"}


def parse_sources() -> dict[str, list[ast.AST]]:
    """Return the nodes of every module of this project."""
    return {
        path.relative_to(ROOT).as_posix(): list(ast.walk(ast.parse(path.read_text(), str(path))))
        for folder in (*PACKAGES, "tests", "docs", "ci")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def is_private(name: str) -> bool:
    return (
        name.startswith("_")
        and not name.startswith("__")
        and name != "_"
        and name not in NAMED_TUPLE | OF_OTHER_LIBRARIES
    )


def own_names(nodes: list[ast.AST]) -> set[str]:
    """Return the private names that a module of this project defines."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def foreign_names(module: str, nodes: list[ast.AST], own: set[str]) -> set[str]:
    """Return the private names in a module that are not this project's."""
    packaged = module.startswith(PACKAGES)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            # In the packages, only an object itself uses its private attributes: others are another library's.
            names |= {node.attr} - (own if is_self(node.value) or not packaged else set())
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            names |= {*node.module.split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.keyword) and node.arg:
            names |= {node.arg} - own
    private = {name for name in names if is_private(name) and not name.startswith("_foreach_")}
    return private | looked_up(nodes)


def looked_up(nodes: list[ast.AST]) -> set[str]:
    """Return the names that are looked up as strings; the ones without an underscore are private by their owner."""
    return {
        arg.value
        for call in nodes
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in LOOKUPS
        for arg in call.args
        if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
        if is_private(arg.value) or call.func.id == "private"
    }


def test_private_names_of_others_occur_in_these_modules_only() -> None:
    sources = parse_sources()
    own = {name for nodes in sources.values() for name in own_names(nodes)}
    found = {name: foreign_names(name, nodes, own) for name, nodes in sources.items() if name not in STAND_INS}
    assert {module: names for module, names in found.items() if names} == PRIVATE_NAMES


def test_the_readme_and_the_metadata_say_what_was_tested_and_when() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    for text in ((ROOT / "README.md").read_text(), pyproject):
        assert re.search(rf"{', '.join(TESTED_VERSIONS[:-1])} and {TESTED_VERSIONS[-1]}\b.*{TESTED_ON}", text)
    oldest = TESTED_VERSIONS[0].rpartition(".")[0]
    assert f"torch>={oldest}" in tomllib.loads(pyproject)["project"]["dependencies"]
