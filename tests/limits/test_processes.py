"""What docs/guide/serve.md says of threads, fork and spawn."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

import late_interaction as li

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import multiprocessing, sys
import torch
import late_interaction as li

generator = torch.Generator().manual_seed(0)
Q, D = torch.randn(8, 32, 64, generator=generator), torch.randn(300, 40, 64, generator=generator)

def step(q):
    q.requires_grad_()
    li.maxsim(q, D, normalize=True).sum().backward()
    return q.grad

def child(kind, queue):
    if kind == "fork":
        torch.set_num_threads(1)
    queue.put(step(Q.clone()).tolist())

if __name__ == "__main__":
    torch.set_num_threads(2)
    wanted = step(Q.clone())  # with several threads, which a forked child does not have
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(sys.argv[1], queue))
    process.start()
    assert torch.equal(torch.tensor(queue.get()), wanted)
    process.join()
"""


def test_threads_share_operators_and_losses():
    Q, D = normalize(torch.randn(8, 32, 64), dim=-1), normalize(torch.randn(300, 40, 64), dim=-1)

    def work():
        q, d = Q.clone().requires_grad_(), D.clone().requires_grad_()
        loss = cross_entropy(li.maxsim(q, d), torch.arange(8)) + li.losses.contrastive(q, d[:8])
        loss.backward()
        return loss.detach(), q.grad, d.grad, *li.search(Q, D, 5, progress=False)

    wanted, found = work(), []
    threads = [threading.Thread(target=lambda: found.extend(work() for _ in range(3))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    for one in found:
        assert all(torch.equal(x, y) for x, y in zip(one, wanted, strict=True))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_computes_the_same(method, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program, method], capture_output=True, text=True, timeout=300,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
