"""A process of the suite of first calls: the import of a library and its first call, by the wall clock.

Nothing that it imports before the clock starts may import late_interaction, whose import would then take no
time.
"""

import argparse
import json
import time
from dataclasses import replace

import torch

from bench.harness.inputs import draw
from bench.harness.library import training_step
from bench.harness.named_shapes import FORWARD, TRAINING
from bench.peers.implementations import KEYS

OPS = {
    "fwd": next(s for s in FORWARD if s.name == "text-short"),
    "fwd+bwd": next(s for s in TRAINING if s.name == "train-32"),
}
TINY = {op: replace(shape, Nq=min(shape.Nq, 2), Nd=3, Ld=16) for op, shape in OPS.items()}
IMPORT = "import"  # in place of an op: import the library and call nothing


def _sync(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def child(key, op, device, tiny):
    """Milliseconds of the import and of the first call, in this process."""
    shape = (TINY if tiny else OPS)["fwd" if op == IMPORT else op]
    x = draw(shape, device, torch.bfloat16)
    x.require_grad()
    # PyTorch's own first backward imports modules for a second, which is not the library's time.
    torch.autograd.grad(2 * x.Q, x.Q, x.Q.detach())
    _sync(device)

    clock = time.perf_counter
    start = clock()
    impl = KEYS[key]()
    imported = clock()
    if op == "fwd":
        impl.score(shape, None, train=False)(x.Q.detach(), x.D.detach())
    elif op != IMPORT:
        training_step(impl.score(shape, impl.backwards[0], train=True), *x.step)()
    _sync(device)
    return {"import_ms": 1e3 * (imported - start), "call_ms": 1e3 * (clock() - imported)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("key", choices=list(KEYS))
    parser.add_argument("op", choices=[*OPS, IMPORT])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    print(json.dumps(child(args.key, args.op, torch.device(args.device), args.tiny)))
