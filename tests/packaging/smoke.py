"""What an installed late_interaction must do in any environment. Run as a script; needs nothing but torch.

With a GPU it checks the CUDA library too, and says so; with --expect-cuda it fails where it cannot.
"""

import platform
import sys
from pathlib import Path

import torch

import late_interaction as li


def reference(Q, D, d_mask):
    sim = torch.einsum("isk,jtk->ijst", Q, D).masked_fill(~d_mask[None, :, None, :], -torch.inf)
    return sim.amax(-1).sum(-1)


def check(device):
    generator = torch.Generator().manual_seed(0)
    Q = torch.randn(3, 5, 64, generator=generator).to(device).requires_grad_()
    D = torch.randn(4, 37, 64, generator=generator).to(device).requires_grad_()
    d_mask = torch.ones(4, 37, dtype=torch.bool, device=device)
    d_mask[1, 20:] = False

    torch.backends.cuda.matmul.allow_tf32 = False
    want = reference(Q, D, d_mask)
    want_grads = torch.autograd.grad(want.square().sum(), (Q, D))
    for backward in ("lowmem", "unified"):
        got = li.maxsim(Q, D, None, d_mask, backward=backward)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        grads = torch.autograd.grad(got.square().sum(), (Q, D))
        for grad, want_grad in zip(grads, want_grads, strict=True):
            torch.testing.assert_close(grad, want_grad, rtol=1e-3, atol=1e-3)

    half = li.maxsim(Q.detach().bfloat16(), D.detach().bfloat16(), None, d_mask)
    torch.testing.assert_close(half, want.detach(), rtol=5e-2, atol=5e-1)

    scores, documents = li.search(Q.detach(), D.detach(), d_mask=d_mask, k=2, normalize=False)
    want_scores, want_documents = want.detach().topk(2)
    assert torch.equal(documents.long(), want_documents.to(documents.device))
    torch.testing.assert_close(scores.float(), want_scores.to(scores.device), rtol=1e-4, atol=1e-4)


def main():
    package = Path(li.__file__).parent
    check("cpu")
    checked = ["cpu"]
    if torch.cuda.is_available() and (package / "_cuda.abi3.so").exists():
        check("cuda")
        checked.append(torch.cuda.get_device_name())
    elif "--expect-cuda" in sys.argv:
        sys.exit("no CUDA device, or no CUDA library beside the package")
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"ok: late_interaction {li.__version__}, {versions}: {', '.join(checked)}")


if __name__ == "__main__":
    main()
