"""Programs that stand in for a CUDA toolkit and a driver, as far as a build looks at them."""


def script(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)


def fake_toolkit(folder, release, archs=(75, 80, 86, 89, 90, 100, 120)):
    """A CUDA toolkit as far as setup.py looks at it."""
    listed = "\\n".join(f"compute_{arch}" for arch in archs)
    script(
        folder / "bin" / "nvcc",
        f'case "$*" in\n*--list-gpu-arch*) printf "{listed}\\n" ;;\n'
        f"*) echo 'Cuda compilation tools, release {release}, V{release}.1' ;;\nesac",
    )
    (folder / "lib64").mkdir(exist_ok=True)
    (folder / "lib64" / "libcudart_static.a").touch()
    return str(folder)
