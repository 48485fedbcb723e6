"""List the functions that compute a MaxSim in the newest releases of the libraries that are patched.

    python -m tools.maxsim_sentinel FOLDER    downloads the releases, and unpacks their modules there

It fails where tools/maxsim_leaves.py does not say which patch reaches a function, or why none does, and where
that names a function that is there no more.

A MaxSim is a product of embeddings (an einsum, a matrix product), a maximum of it, and a sum of maxima. It is
followed in the source, through the variables of a function and the functions of its module that it calls. Not
seen is a product that another module makes.
"""

import ast
import re
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.maxsim_leaves import LEAVES

NOTHING, PRODUCT, MAXIMA, SUM = range(4)  # how far a value is on its way to a MaxSim
PRODUCTS = {"baddbmm", "bmm", "dot", "einsum", "inner", "matmul", "mm", "tensordot"}
MAXIMUM = {"amax", "logsumexp", "max", "nanmax", "topk"}
SUMS = {"average", "mean", "nanmean", "nansum", "sum"}
NO_VALUES = {"device", "dim", "dtype", "indices", "len", "ndim", "numel", "shape", "size"}  # of a tensor
MAY_MULTIPLY = re.compile(rf" @ |\b({'|'.join(PRODUCTS)})\(")

Function = ast.FunctionDef | ast.AsyncFunctionDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def leaves(release: Path) -> Iterator[tuple[str, str]]:
    """Find the functions that compute a MaxSim: module.Class.function below its package, and file:line."""
    for path in sorted(release.rglob("*.py")):
        source, inner = path.read_text(encoding="utf-8", errors="replace"), path.relative_to(release)
        if not MAY_MULTIPLY.search(source):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings
            functions = dict(functions_of(ast.parse(source, str(path))))
        calls = Calls({function.name: function for function in functions.values()})
        for name, function in functions.items():
            if Body(function, {}, calls).is_maxsim:
                yield ".".join([*inner.with_suffix("").parts[1:], name]), f"{inner}:{function.lineno}"


def functions_of(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, DEFINITIONS)
        if named and not isinstance(node, ast.ClassDef):
            yield prefix + node.name, node
        yield from functions_of(node, f"{prefix}{node.name}." if named else prefix)


class Calls:
    """Calls of the functions of a module, each followed once."""

    def __init__(self, functions: dict[str, Function]) -> None:
        self.functions = functions
        self.followed: dict[tuple[str, tuple[tuple[str, int], ...]], Body | None] = {}

    def follow(self, name: str, positional: list[int], named: dict[str | None, int]) -> "Body | None":
        """Return what a call does, or None for one within itself."""
        arguments = self.functions[name].args
        parameters = [x.arg for x in (*arguments.posonlyargs, *arguments.args)]
        parameters = parameters[parameters[:1] in (["self"], ["cls"]) :]
        levels = dict(zip(parameters, positional, strict=False)) | {k: v for k, v in named.items() if k}
        key = name, tuple(sorted(levels.items()))
        if key not in self.followed:
            self.followed[key] = None
            self.followed[key] = Body(self.functions[name], levels, self)
        return self.followed[key]


class Body(ast.NodeVisitor):
    """The statements of a function, with the level of each of its variables."""

    def __init__(self, function: Function, levels: dict[str, int], calls: Calls) -> None:
        self.levels, self.calls = dict(levels), calls
        self.returned, self.is_maxsim = NOTHING, False
        for statement in function.body * 2:  # the second time with what a loop's round has left for the next
            self.visit(statement)

    def visit_Return(self, node: ast.Return) -> None:
        self.returned = max(self.returned, self.level(node.value))

    def visit_Assign(self, node: ast.Assign) -> None:
        level = self.level(node.value)
        for target in node.targets:
            self.assign(target, level)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.assign(node.target, self.level(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        level = self.level(node.value)
        self.is_maxsim |= isinstance(node.op, ast.Add) and level == MAXIMA
        self.assign(node.target, least((level, self.level(node.target))))

    def visit_For(self, node: ast.For) -> None:
        self.assign(node.target, self.level(node.iter))
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, DEFINITIONS):  # bodies of their own
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.level(child)
            else:
                self.visit(child)

    def assign(self, target: ast.expr, level: int) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for part in target.elts:
                self.assign(part, level)
        elif isinstance(target, (ast.Starred, ast.Subscript)):  # the rest of it stays what it was
            self.assign(target.value, max(level, self.level(target.value)))
        else:
            self.levels[ast.unparse(target)] = level

    def level(self, node: ast.expr | None) -> int:
        """Return how far the value of an expression is."""
        match node:
            case None | ast.Lambda() | ast.Constant():
                return NOTHING
            case ast.Name():
                return self.levels.get(node.id, NOTHING)
            case ast.Attribute() if (variable := ast.unparse(node)) in self.levels:
                return self.levels[variable]
            case ast.Attribute():
                return NOTHING if node.attr in NO_VALUES else self.level(node.value)
            case ast.NamedExpr():
                self.assign(node.target, self.level(node.value))
                return self.levels[node.target.id]
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                for generator in node.generators:
                    self.assign(generator.target, self.level(generator.iter))
                return self.level(node.elt)
            case ast.IfExp():
                return max(self.level(node.body), self.level(node.orelse))
            case ast.Subscript():
                return self.level(node.value)
            case ast.BinOp(op=ast.MatMult()):
                return PRODUCT
            case ast.Call():
                return self.level_of_call(node)
        return least(self.level(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))

    def level_of_call(self, node: ast.Call) -> int:
        method = node.func if isinstance(node.func, ast.Attribute) else None
        name = method.attr if method else getattr(node.func, "id", "")
        positional = [self.level(x) for x in node.args]
        named = {x.arg: self.level(x.value) for x in node.keywords}
        level = (self.level(method.value) if method else NOTHING) or least((*positional, *named.values()))
        if name in NO_VALUES:
            return NOTHING
        if name in PRODUCTS:
            return PRODUCT
        if name in MAXIMUM and level == PRODUCT:
            return MAXIMA
        if name in SUMS and level == MAXIMA:
            self.is_maxsim = True
            return SUM
        if method and name in ("append", "extend"):
            self.assign(method.value, max(level, *positional))
        elif name in self.calls.functions:
            body = self.calls.follow(name, positional, named)
            if body is not None:
                self.is_maxsim |= body.is_maxsim and level in (PRODUCT, MAXIMA)
                return body.returned
        return level


def least(levels: Iterable[int]) -> int:
    """Return the lowest level above nothing: similarities less their maximum are similarities."""
    return min((level for level in levels if level), default=NOTHING)


def download(package: str, folder: Path) -> Path:
    """Unpack the modules of the newest release that pip finds into a folder of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        newest = ["--no-deps", "--only-binary=:all:", "--python-version=3.13", f"--dest={scratch}", package]
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *newest], check=True)
        (wheel,) = Path(scratch).iterdir()
        release = folder / f"{package}=={wheel.name.split('-')[1]}"
        if not release.exists():
            with zipfile.ZipFile(wheel) as archive:
                names = [x for x in archive.namelist() if x.endswith(".py") or ".dist-info/" in x]
                archive.extractall(release, names)
    return release


def unlike(release: Path, table: dict[str, str]) -> list[str]:
    """Print what a release has, and return where the table is silent, or speaks of what is not there."""
    found = dict(leaves(release))
    for name, place in found.items():
        print(f"{release.name} {place}: {name}\n    {table.get(name, 'not in the table')}")
    unknown = [f"{found[name]}: {name} is reached by no patch" for name in found.keys() - table.keys()]
    gone = [f"{name} is in maxsim_leaves.py, and there no more" for name in table.keys() - found.keys()]
    return [f"{release.name} {text}" for text in sorted(unknown + gone)]


def main(folder: str) -> int:
    wrong = [x for package, table in LEAVES.items() for x in unlike(download(package, Path(folder)), table)]
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
