"""A model that scores Tokens, as a package of AOTInductor that another process loads."""

import subprocess
import sys

import torch

import late_interaction as li
from tests.support.calls import needs_compiler

D = 8
LOAD = """
import sys, torch, late_interaction
model = torch._inductor.aoti_load_package(sys.argv[1])
for inputs, wanted in torch.load(sys.argv[2]):
    for got, score in zip(model(*inputs), wanted, strict=True):
        torch.testing.assert_close(got, score, rtol=1e-6, atol=1e-6)
"""


class Scores(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(D, D, bias=False)

    def forward(self, Q, Q_packed, D_packed):
        Q = li.Tokens(self.project(Q.values), Q.mask)
        return (
            li.maxsim(Q, D_packed, normalize=True),
            li.maxsim(Q_packed, D_packed, mean=True),
            li.maxsim(Q, Q, normalize=True),
            li.maxsim_pairs(Q_packed, D_packed),
            *li.maxsim_with_winners(Q, Q, normalize=True),
        )


def packed(lengths):
    return li.Tokens.from_list([torch.randn(n, D) for n in lengths])


def inputs(N, lengths_q, lengths_d):
    kept = torch.arange(6) < torch.randint(1, 7, (N, 1))
    return li.Tokens(torch.randn(N, 6, D), kept), packed(lengths_q), packed(lengths_d)


@needs_compiler
def test_another_process_scores_batches_of_other_sizes_alike(tmp_path):
    model, any_size = Scores(), torch.export.Dim.AUTO
    batch = inputs(3, [3, 5, 2], [7, 4, 9])
    leaves = ([{0: any_size}] * 2, [{0: any_size}] * 3, [{0: any_size}] * 3)
    program = torch.export.export(model, batch, dynamic_shapes=leaves)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "scores.pt2"))
    others = [batch, inputs(5, [4, 1], [2, 11]), inputs(2, [1, 7, 3, 2], [30, 8, 1, 3])]
    torch.save([(x, [y.detach() for y in model(*x)]) for x in others], tmp_path / "batches.pt")
    run = [sys.executable, "-c", LOAD, package, str(tmp_path / "batches.pt")]
    loaded = subprocess.run(run, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
