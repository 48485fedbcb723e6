"""The layout of Hugging Face's kernel hub (make hub), and the namespace of a build's operators."""

import ast
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import late_interaction
from late_interaction.ops import _library
from tests.selection import NIGHTLY
from tests.support import side_by_side
from tests.support.programs import ROOT, printed, python
from tools import make_hub

LIBRARIES = Path(late_interaction.__file__).parent
(KERNELS,) = side_by_side.releases("kernels")
OTHER = "late_interaction_other"
BACKEND = "cpu" if torch.version.cuda else None  # None: kernels finds it
SOURCES = (".h", ".cuh", ".cu", ".cpp")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """What make hub makes of the CPU library, which is there on every machine that runs the tests."""
    libraries = tmp_path_factory.mktemp("libraries")
    shutil.copy(LIBRARIES / make_hub.CPU_LIBRARY, libraries)
    out = tmp_path_factory.mktemp("hub") / "build"
    make_hub.make_hub(libraries, out, 1)
    return out


def ran(code, tmp_path, *kernels):
    """Runs the code where the checkout is not to be found. kernels: also where that package is."""
    variables = {"PYTHONPATH": os.pathsep.join(map(str, kernels)), "HF_HUB_OFFLINE": "1"}
    return printed(sys.executable, "-W", "ignore", "-c", code, cwd=tmp_path, variables=variables)


@pytest.fixture
def kernels():
    folder = side_by_side.FOLDER / f"kernels=={KERNELS}"
    if not folder.is_dir():
        pytest.skip(f"kernels {KERNELS} is not in {side_by_side.FOLDER}: make ci installs it")
    pytest.importorskip("huggingface_hub", reason="make test installs it (requirements/demo.txt)")
    return folder


def test_kernels_loads_it(hub, kernels, tmp_path):
    """By its own name for the package, and without the checkout: scores, gradients, a compiled call, a module
    that is not imported at once."""
    code = f"""
import importlib, sys
from pathlib import Path
import kernels, torch
li = kernels.get_local_kernel(Path({str(hub.parent)!r}), backend={BACKEND!r})
assert li is kernels.get_local_kernel(Path({str(hub)!r}), backend={BACKEND!r})
(loaded,) = kernels.get_loaded_kernels()
assert loaded.module is li and str(loaded.metadata.name) == "late-interaction", loaded
assert li.__name__ == loaded.metadata.id and Path(li.__file__).parent.parent == Path({str(hub)!r})
Q, D = torch.randn(3, 5, 8).double().requires_grad_(), torch.randn(4, 7, 8).double().requires_grad_()
wanted = torch.einsum("isd,jtd->ijst", Q, D).amax(-1).sum(-1)
for score in (li.maxsim, torch.compile(li.maxsim, fullgraph=True, backend="aot_eager")):
    found = score(Q, D)
    torch.testing.assert_close(found, wanted)
    gradients = torch.autograd.grad(found.square().sum(), (Q, D))
    for one, other in zip(gradients, torch.autograd.grad(wanted.square().sum(), (Q, D), retain_graph=True)):
        torch.testing.assert_close(one, other)
codecs = importlib.import_module(li.__name__ + ".codecs")
assert codecs.Fp8().encode(D.float()).values.dtype == torch.float8_e4m3fn
print(li.__version__, "late_interaction" in sys.modules)
"""
    assert ran(code, tmp_path, kernels).split() == [(ROOT / "VERSION").read_text().strip(), "False"]


def test_its_patches_work(hub, kernels, tmp_path):
    """They run code in another library's namespace, which imports the package by its id."""
    pytest.importorskip("sentence_transformers", reason="make test installs it (requirements/demo.txt)")
    code = f"""
from pathlib import Path
import kernels, torch
li = kernels.get_local_kernel(Path({str(hub)!r}), backend={BACKEND!r})
from sentence_transformers.util.similarity import maxsim
queries, documents = [torch.randn(n, 8) for n in (3, 5)], [torch.randn(n, 8) for n in (4, 2, 9)]
wanted = maxsim(queries, documents)
li.patch("sentence-transformers")
torch.einsum = None
torch.testing.assert_close(maxsim(queries, documents), wanted)
print("scored")
"""
    assert ran(code, tmp_path, kernels) == "scored\n"


def test_metadata_as_kernels_parses_it(hub, kernels, tmp_path):
    (folder,) = hub.iterdir()
    code = f"""
from kernels._rust import Metadata
from kernels.variants import parse_variant
told = Metadata.read_from_file({str(folder / "metadata.json")!r})
variant = parse_variant({folder.name!r})
assert variant.variant_str == {folder.name!r} and variant.framework.variant_str == "torch-stable-abi210"
print(told.version, told.license, told.kernels_minver, told.backend.backend_type, told.python_depends)
"""
    said = ran(code, tmp_path, kernels)
    assert said == f"1 Apache-2.0 {make_hub.OLDEST_KERNELS} cpu []\n"


def test_a_folder_for_each_backend(tmp_path, kernels):
    """The CUDA library says what it was built for, so a file with the same words in it is packed alike."""
    libraries, out = tmp_path / "libraries", tmp_path / "build"
    libraries.mkdir()
    shutil.copy(LIBRARIES / make_hub.CPU_LIBRARY, libraries)
    words = ("namespace=late_interaction", "cuda_version=13020", "cuda_archs=8.0_9.0a_9.0+PTX")
    cuda = libraries / make_hub.CUDA_LIBRARY
    cuda.write_bytes(b"\0".join(f"late_interaction_{word}".encode() for word in words) + b"\0")
    machine = os.uname().machine
    names = [f"torch-stable-abi210-{backend}-{machine}-linux" for backend in ("cpu", "cu132")]
    assert [folder.name for folder in make_hub.make_hub(libraries, out, 3)] == names
    metadata = json.loads((out / names[1] / "metadata.json").read_text())
    assert metadata["backend"] == {"type": "cuda", "archs": ["8.0", "9.0a", "9.0+PTX"]}
    assert (metadata["version"], metadata["id"].split("_")[3]) == (3, "cu132")
    packed = [sorted(path.name for path in (out / name).glob("*.so")) for name in names]
    assert packed == [[make_hub.CPU_LIBRARY], [make_hub.CPU_LIBRARY, make_hub.CUDA_LIBRARY]]
    code = f"""
from pathlib import Path
from packaging.version import Version
from kernels._rust import Metadata
from kernels.archs import _supports_cuda_capability
from kernels.backends import CPU, CUDA
from kernels.variants import _resolve_variant_for_system, get_variants_local
archs = Metadata.read_from_file({str(out / names[1] / "metadata.json")!r}).backend.archs
fits = [_supports_cuda_capability(archs, capability) for capability in ((7, 5), (8, 6), (9, 0), (10, 0))]
cuda = CUDA(Version("13.2")), CUDA(Version("13.0"))
for backend, torch in (CPU(), "2.10"), (cuda[0], "2.13"), (cuda[1], "2.13"), (CPU(), "2.9"):
    found, _ = _resolve_variant_for_system(
        get_variants_local(Path({str(out)!r})), backend, {machine!r}, "linux", Version(torch), True, None
    )
    print(*(variant.variant_str for variant in found))
print(*fits)
"""
    assert ran(code, tmp_path, kernels).splitlines() == [*names, "", "", "False True True True"]


def test_libraries_of_two_builds_are_refused(tmp_path):
    shutil.copy(LIBRARIES / make_hub.CPU_LIBRARY, tmp_path)
    (tmp_path / make_hub.CUDA_LIBRARY).write_bytes(b"late_interaction_namespace=another\0")
    with pytest.raises(SystemExit, match="are of another, late_interaction: build them again"):
        make_hub.make_hub(tmp_path, tmp_path / "build", 1)
    with pytest.raises(SystemExit, match="build it first"):
        make_hub.make_hub(tmp_path / "nowhere", tmp_path / "build", 1)


def test_imports_become_relative():
    code = '''"""from late_interaction import this"""
from late_interaction import ops
from late_interaction.ops import (
    dense,
)
import torch  # and no more

def patched():
    from late_interaction.integrations.sentence_transformers import _chunks
'''
    assert make_hub.with_own_imports(code, 1, "_id").splitlines()[1:] == [
        "from .. import ops",
        "from ..ops import (",
        "    dense,",
        ")",
        "import torch  # and no more",
        "",
        "def patched():",
        "    from _id.integrations.sentence_transformers import _chunks",
    ]


# ---- the namespace ----


def test_one_place_knows_the_namespace():
    """Host code registers by common/registration.h, and Python names operators by ops/_library.py."""
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in SOURCES and path.name != "registration.h":
            text = path.read_text()
            assert "STABLE_TORCH_LIBRARY" not in text and '"late_interaction::' not in text, path
    for path in (ROOT / "late_interaction").rglob("*.py"):
        tree = ast.parse(path.read_text())
        documentation = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == "late_interaction":
                raise AssertionError(f"{path}:{node.lineno}: torch.ops.late_interaction")
            if isinstance(node, ast.Constant) and id(node) not in documentation:
                assert "late_interaction::" not in str(node.value), f"{path}:{node.lineno}"


def test_the_library_says_its_namespace():
    assert make_hub.embedded(LIBRARIES / make_hub.CPU_LIBRARY) == {"namespace": "late_interaction"}


def test_a_cuda_library_of_another_namespace_is_not_loaded(monkeypatch, tmp_path):
    cuda = tmp_path / "_cuda.abi3.so"
    cuda.write_bytes(b"late_interaction_namespace=another\0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_library, "_path", lambda name: str(cuda))
    monkeypatch.setattr(torch.ops, "load_library", None)
    missing = _library._load_cuda("late_interaction")
    assert (
        missing == f"{cuda} was built for torch.ops.another, and the operators are torch.ops.late_interaction"
    )


def test_a_library_of_another_release_is_named(monkeypatch, tmp_path):
    """One that says no namespace, as those before this option."""
    old = tmp_path / "_C.abi3.so"
    old.write_bytes(b"an old library")
    monkeypatch.setattr(_library, "_path", lambda name: str(old))
    with pytest.raises(ImportError, match="is not of this release of late_interaction: build it again"):
        _library._load_cpu()


def test_a_second_build_of_one_namespace_is_refused(hub, kernels, tmp_path):
    """PyTorch would crash the process."""
    code = f"""
import sys
from pathlib import Path
import kernels
li = kernels.get_local_kernel(Path({str(hub)!r}), backend={BACKEND!r})
sys.path.insert(0, {str(ROOT)!r})
try:
    import late_interaction
except ImportError as error:
    print(error)
"""
    said = ran(code, tmp_path, kernels)
    assert said.startswith(f"torch.ops.late_interaction exists already: this process has loaded {hub}")
    assert "build one with another LATE_INTERACTION_NAMESPACE" in said


def test_the_same_library_loaded_again_is_called_the_same():
    path = _library._path("_C")
    with pytest.raises(ImportError, match=f"this process has loaded {re.escape(path)}. Import .* once"):
        _library._load_cpu()


@pytest.mark.skipif(not NIGHTLY, reason="compiles the CPU library again, for minutes: make nightly")
def test_two_namespaces_in_one_process(kernels, tmp_path):
    """The checkout's library and one of another namespace: each scores, forward, backward and compiled, and
    forcing the kernels of one leaves the other alone."""
    variables = {"LATE_INTERACTION_NAMESPACE": OTHER, "LATE_INTERACTION_WITH_CUDA": "0"}
    build = ("setup.py", "--quiet", "build_ext", "--build-lib", tmp_path / "libraries")
    printed(sys.executable, *build, cwd=ROOT, variables=variables)
    (folder,) = make_hub.make_hub(tmp_path / "libraries" / "late_interaction", tmp_path / "build", 1)
    assert re.match(rf"_{OTHER}_cpu_", json.loads((folder / "metadata.json").read_text())["id"])
    code = f"""
import sys
from pathlib import Path
import kernels, torch
sys.path.insert(0, {str(ROOT)!r})
import late_interaction
other = kernels.get_local_kernel(Path({str(tmp_path / "build")!r}), backend={BACKEND!r})
Q, D = torch.randn(3, 5, 128).requires_grad_(), torch.randn(4, 70, 128).requires_grad_()
called = []
class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        called.append(func.namespace)
        return func(*args, **(kwargs or {{}}))
results = []
for li in (late_interaction, other):
    with Calls():
        scores = li.maxsim(Q, D)
    compiled = torch.compile(li.maxsim, fullgraph=True, backend="aot_eager")(Q, D)
    results.append((scores, compiled, *torch.autograd.grad(scores.square().sum(), (Q, D))))
for one, other_one in zip(*results):
    assert torch.equal(one, other_one)
torch.ops.{OTHER}.cpu_isa("portable")
assert torch.equal(late_interaction.maxsim(Q, D), results[0][0])
torch.testing.assert_close(other.maxsim(Q, D), results[0][0])
print(sorted(set(called) - {{"aten"}}))
"""
    assert ran(code, tmp_path, kernels) == f"['late_interaction', '{OTHER}']\n"


def test_a_namespace_is_a_name():
    """Each time setup.py imports PyTorch: both names in one process."""
    code = """
import os, runpy
for name in ("1st", "a.b"):
    os.environ["LATE_INTERACTION_NAMESPACE"] = name
    try:
        runpy.run_path("setup.py")
    except SystemExit as error:
        print(error)
"""
    lines = python("-c", code, cwd=ROOT).stdout.splitlines()
    said = [f"must be a name such as late_interaction_v2, got {name!r}." for name in ("1st", "a.b")]
    assert len(lines) == 2 and all(map(str.endswith, lines, said)), lines
