"""The order of packages, checked from the imports; and what `import lowtri` loads."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import lowtri
from lowtri import drawing
from lowtri.backends import BACKENDS

SOURCE = Path(lowtri.__file__).parent

PACKAGES = [  # the order of reading: a package imports only from those before it
    "_version",
    "errors",
    "forks",
    "extras",
    "system",
    "files",
    "progress",
    "sentences",
    "drawing",
    "compat",
    "masks",
    "plain_torch",
    "plain",
    "ops",
    "kernels",
    "backends",
    "dispatch",
    "generation",
    "nn",
    "pretrained",
    "pictures",
    "showing",
    "parallel",
    "auditing",
    "verifying",
    "explaining",
    "benching",
    "doctor",
    "integrations",
    "lesson",
    "cli",
    "__main__",
]

PUBLIC_PACKAGES = {"nn", "parallel", "plain"}
FILES = sorted(SOURCE.rglob("*.py"))


class Import(NamedTuple):
    file: str  # e.g. masks/mask.py
    line: int
    module: str  # e.g. lowtri.masks.plan
    name: str  # "" where the module itself is imported
    lazy: bool  # inside a function

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module} {self.name}"


def imports_of(path: Path) -> Iterator[Import]:
    """Every import of lowtri in a file, also inside functions; a public name stands for the file that defines it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}  # with annotations, never evaluated
    file = path.relative_to(SOURCE).as_posix()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("lowtri."):
                    yield Import(file, node.lineno, alias.name, "", id(node) in inside)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are written in full"
            if (node.module or "").split(".")[0] == "lowtri":
                for alias in node.names:
                    yield Import(file, node.lineno, *definition_of(node.module, alias.name), id(node) in inside)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "lowtri":
            yield Import(file, node.lineno, *definition_of("lowtri", node.attr), id(node) in inside)


def definition_of(module: str, name: str) -> tuple[str, str]:
    """The module that defines a name, and the name; "" if the name is a module itself."""
    path = SOURCE.parent.joinpath(*module.split("."), name)
    if path.is_dir() or path.with_suffix(".py").exists():
        return f"{module}.{name}", ""
    if module == "lowtri":
        return lowtri._HOME.get(name, "lowtri._version"), name
    return module, name


IMPORTS = [statement for path in FILES if path != SOURCE / "__init__.py" for statement in imports_of(path)]


def package_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def test_every_package_is_in_the_list() -> None:
    packages = {package_of(path.relative_to(SOURCE).as_posix()) for path in FILES} - {"__init__"}
    assert packages == set(PACKAGES)


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda folder: folder.name)
def test_the_docstring_of_a_package_names_its_files(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    files = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    private = {"__init__", "__main__", "_version"}
    assert sorted(name for name in files - private if not re.search(rf"^ *{name}\b", text, re.M)) == []


def test_the_docstring_of_lowtri_lists_packages_in_their_order() -> None:
    listed = re.findall(r"^    (\w+)  +\S", lowtri.__doc__ or "", re.M)
    assert [name for name in listed if name in PACKAGES] == [name for name in PACKAGES if name in listed]


def test_packages_import_only_from_those_before_them() -> None:
    order = PACKAGES.index
    assert len(IMPORTS) > 50
    assert [str(i) for i in IMPORTS if order(i.module.split(".")[1]) > order(package_of(i.file))] == []


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Files that import one another in a circle, in its order; empty if there is none."""
    path: list[str] = []
    done: set[str] = set()

    def visit(file: str) -> list[str]:
        if file in path:
            return [*path[path.index(file) :], file]
        if file in done:
            return []
        path.append(file)
        for other in sorted(edges.get(file, ())):
            if files := visit(other):
                return files
        done.add(path.pop())
        return []

    return next((files for file in sorted(edges) if (files := visit(file))), [])


def files_imported(package: str) -> dict[str, set[str]]:
    """For each file of a package the files of it that it imports, inside functions and for type checkers, too."""
    prefix = f"lowtri.{package}."
    edges: dict[str, set[str]] = {}
    for statement in IMPORTS:
        if statement.file.startswith(f"{package}/") and f"{statement.module}.".startswith(prefix):
            module = f"lowtri.{statement.file}".removesuffix(".py").replace("/", ".").removesuffix(".__init__")
            edges.setdefault(module, set()).add(statement.module)
    return edges


@pytest.mark.parametrize("package", PACKAGES)
def test_no_files_of_a_package_form_a_circle(package: str) -> None:
    assert circle(files_imported(package)) == []


def test_imports_between_files_of_a_package_are_found() -> None:
    """Else the test above would pass without looking."""
    edges = files_imported("masks")
    assert "lowtri.masks.tile" in edges["lowtri.masks.mask"] and sum(map(len, edges.values())) > 10


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}) == ["b", "d", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_masks_know_numpy_only() -> None:
    for path in [*(SOURCE / "masks").glob("*.py"), SOURCE / "errors.py", SOURCE / "files.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top, *inside = name.split(".")
                known = top == "numpy" or top in sys.stdlib_module_names
                known = known or inside[:1] in (["errors"], ["forks"], ["system"], ["drawing"], ["compat"], ["masks"])
                assert known, f"{path.name} imports {name}"


def test_methods_that_draw_are_functions_of_pictures() -> None:
    """The core names its pictures in one table, and loads them when one is shown."""
    core = "import lowtri.dispatch.choose, lowtri.generation.cache, lowtri.masks as m, sys; print(repr(m.causal())); {}"
    code = core.format("print(*[name for name in sys.modules if name.startswith('lowtri.pictures')])")
    assert process_output(code) == "causal\n\n"
    for place, (module, name) in drawing.METHODS.items():
        assert module.startswith("lowtri.pictures.")
        class_name, method = place.split(".")
        homes = {"Mask": "lowtri.masks.mask", "Choice": "lowtri.dispatch.choose", "KVCache": "lowtri.generation.cache"}
        owner = getattr(importlib.import_module(homes[class_name]), class_name)
        assert getattr(owner, method) is getattr(importlib.import_module(module), name)


def test_no_backend_imports_another() -> None:
    """A backend is a file or a folder that imports no other backend; only dispatch names them all."""
    wrong = []
    for statement in IMPORTS:
        parts = statement.file.removesuffix(".py").split("/")
        if parts[0] == "backends" and parts[1] in BACKENDS and statement.module.startswith("lowtri.backends."):
            wrong += [str(statement)] if statement.module.split(".")[2] != parts[1] else []
    assert wrong == []
    assert {path.stem for path in (SOURCE / "backends").iterdir()} >= {*BACKENDS}


def test_packages_import_only_declared_names() -> None:
    """Private names stay in their file; of a public module, other packages import only what its ``__all__`` lists."""
    wrong = []
    for statement in IMPORTS:
        declared = not statement.name.startswith("_") or statement.name == "__version__"
        if package_of(statement.file) != statement.module.split(".")[1] and statement.name not in ("", "__version__"):
            public = getattr(importlib.import_module(statement.module), "__all__", None)
            declared = declared and (public is None or statement.name in public)
        if not declared:
            wrong.append(str(statement))
    assert wrong == []


@pytest.mark.parametrize("path", FILES, ids=[path.relative_to(SOURCE).as_posix() for path in FILES])
def test_all_is_exact(path: Path) -> None:
    """Each name in an ``__all__`` is there, once. Public modules have one; elsewhere the underscore says what is private."""
    dotted = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
    module = importlib.import_module(dotted)
    declared = getattr(module, "__all__", [])
    assert declared or dotted not in ("lowtri", "lowtri.nn", "lowtri.parallel", "lowtri.plain", "lowtri.masks")
    assert len(declared) == len(set(declared))
    assert [name for name in declared if not hasattr(module, name)] == []
    assert [name for name in declared if name.startswith("_") and name != "__version__"] == []


def test_the_public_names() -> None:
    """One list, so that no name is added or removed by accident."""
    masks = "Mask Tile mask causal full window band first documents chunks strided tree tree_depths keys table hidden where heads"
    biases = "alibi distance_bias DistanceBias"
    calls = "attention attention_backward merge scaled_dot_product_attention which_engine "
    calls += "KVCache generate audit assert_causal Model AuditReport infer_mask InferredMask verify VerifyReport explain show"
    errors = "LowtriError MaskError CallError EngineError ExtraError DataError LeakError VerifyError RankError UndecidedError"
    expected = {*masks.split(), *biases.split(), *calls.split(), *errors.split(), *PUBLIC_PACKAGES, "__version__"}
    assert set(lowtri.__all__) == expected
    assert set(dir(lowtri)) == expected
    for name in lowtri.__all__:
        assert getattr(lowtri, name) is not None
    assert set(static_imports()) == expected - {"__version__"}, "type checkers see the public names"
    assert {name: home for name, home in static_imports().items() if name not in PUBLIC_PACKAGES} == lowtri._HOME
    with pytest.raises(AttributeError, match="module 'lowtri' has no attribute 'atention'"):
        lowtri.atention  # noqa: B018


def static_imports() -> dict[str, str]:
    """Name -> module of the imports under ``TYPE_CHECKING`` in ``lowtri/__init__.py``."""
    body = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8")).body
    blocks = [node for node in body if isinstance(node, ast.If)]
    block = next(x for x in blocks if isinstance(x.test, ast.Name) and x.test.id == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname: node.module or "" for node in imports for alias in node.names if alias.asname}


def test_no_package_has_the_name_of_a_public_function() -> None:
    """Else ``lowtri.audit`` would be the package or the function, depending on earlier imports."""
    packages = {path.name.removesuffix(".py") for path in SOURCE.iterdir()}
    assert packages & set(lowtri.__all__) == PUBLIC_PACKAGES


def loaded_after(statement: str) -> set[str]:
    """The top-level modules in a fresh process after a statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    return set(process_output(code).splitlines()[-1].split())


def process_output(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import lowtri", {"numpy", "torch", "numba", "rich", "typer"}),
        ("import lowtri; lowtri.causal().draw(4)", {"torch", "numba", "rich", "typer"}),
        ("import lowtri; lowtri.mask('causal & window(4)').pairs(100)", {"torch", "numba"}),
        ("import lowtri; lowtri.show([[1.0]]).to_svg()", {"torch", "numba", "matplotlib"}),
        ("import lowtri.errors", {"numpy", "torch", "numba"}),
        # Sizes, scratch memory, records and the choice of a kernel; LLVM is not asked which CPU this is.
        (
            "import os; os.environ['NUMBA_CPU_FEATURES'] = ''; import lowtri.kernels.target, lowtri.backends.cpu",
            {"numba", "llvmlite"},
        ),
        ("from lowtri.cli.main import main; main(['--help'])", {"numpy", "torch", "numba", "matplotlib"}),
        ("from lowtri.cli.main import main; main(['mask', 'causal'])", {"torch", "numba", "matplotlib"}),
    ],
)
def test_nothing_is_loaded_before_it_is_used(statement: str, absent: set[str]) -> None:
    assert loaded_after(statement) & absent == set()


def test_modules_that_are_imported_by_their_own_name_have_different_names() -> None:
    """pytest imports from these folders: of two equal names the first would hide the second."""
    root = Path(__file__).parents[1]
    folders = ["tests", "tests/support", "examples", "examples/train", "benchmarks", "tools"]
    names = [path.stem for folder in folders for path in (root / folder).glob("*.py") if path.stem != "__init__"]
    assert [name for name in sorted(set(names)) if names.count(name) > 1] == []
