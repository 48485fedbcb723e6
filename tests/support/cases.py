"""Nasty cases, a few for each behaviour rather than a product of everything.

The lists have lengths that share few factors, so walking them in step meets every value and most pairs.
"""

import dataclasses
import itertools

import torch

from late_interaction import ops

LENGTHS_Q = [32, 1, 0, 33, 7, 64, 2, 127, 31, 129, 65, 63, 300]
LENGTHS_D = [65, 300, 1, 31, 0, 128, 7, 64, 129, 2, 33, 63, 127, 32, 257]
DIMS = [128, 8, 768, 1, 96, 40, 1024, 48, 200]
DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.float64]
QUANTIZED = [torch.float8_e4m3fn, torch.int8, torch.float8_e5m2]
LAYOUTS = ["in-batch", "KD", "pairs"]
MASKS = ["none", "holes", "dead"]
FORMS = ["contiguous", "transposed", "sliced", "offset", "expanded"]
BATCHES = [(2, 3), (1, 5), (5, 1), (3, 4), (0, 2), (1, 1), (7, 2), (2, 0)]


def code_limit(dtype, device="cuda"):
    """The relative error of scores of codes.

    Sums of int8 products are exact where there are kernels for codes. Tensor cores keep fewer bits of a sum
    of fp8 products than float32 has, and other GPUs score dequantized codes by TF32.
    """
    exact = dtype == torch.int8 and (device == "cpu" or ops.cuda_capability() >= 90)
    return 2e-6 if exact else 1e-3 if dtype == torch.int8 else 2e-3


@dataclasses.dataclass(frozen=True)
class Case:
    layout: str
    Nq: int
    N: int
    Lq: int
    Ld: int
    d: int
    dtype: torch.dtype
    masks: str = "none"
    form: str = "contiguous"
    normalize: bool = False

    def __str__(self):
        name = f"{self.layout}-{self.Nq}x{self.N}-{self.Lq}x{self.Ld}-d{self.d}-{str(self.dtype)[6:]}"
        parts = [self.masks * (self.masks != "none"), self.form * (self.form != "contiguous")]
        return "-".join([name, *filter(None, parts), *["normalize"] * self.normalize])

    @property
    def options(self):
        return {"normalize": self.normalize}


def walk(count):
    """`count` cases that between them meet every value of every list."""
    lists = map(itertools.cycle, (LAYOUTS, BATCHES, LENGTHS_Q, LENGTHS_D, DIMS, FORMS))
    for index, (layout, (Nq, N), Lq, Ld, d, form) in enumerate(zip(*lists, strict=False)):
        if index == count:
            return
        N = Nq if layout == "pairs" else N
        dtype, masks = DTYPES[(index + index // 4) % 4], MASKS[(index + index // 3) % 3]
        yield Case(layout, Nq, N, Lq, Ld, d, dtype, masks, form, normalize=index % 5 in (1, 3))


def tokens(shape, dtype, device, form="contiguous"):
    """Random embeddings of this shape that lie in memory in this way; codes spread over their grid."""
    *batch, L, d = shape
    if form == "transposed":  # the embedding dim is not the innermost
        x = torch.randn(*batch, d, L, device=device).transpose(-1, -2)
    elif form == "sliced":  # rows lie further apart than d
        x = torch.randn(*batch, L + 2, d + 3, device=device)
    elif form == "offset":  # starts one element into its storage, so no wide loads
        x = torch.randn(*batch, L * d + 1, device=device)
    elif form == "expanded" and batch and batch[0]:  # one document or query seen many times
        x = torch.randn(1, *batch[1:], L, d, device=device)
    else:
        x = torch.randn(*batch, L, d, device=device)
    x = (40 * x).clamp(-127, 127).to(dtype) if dtype in QUANTIZED else x.to(dtype)
    if form == "sliced":
        x = x[..., 2:, 3:]
    elif form == "offset":
        flat = torch.empty(x.numel() + 1, dtype=dtype, device=device)[1:].copy_(x.flatten())
        x = flat.view(x.shape)[..., 1:].unflatten(-1, (L, d)) if L else x.new_empty(shape)
    return x.expand(shape) if form == "expanded" else x


def begun(x, elements=1):
    """x, so many elements behind the beginning of its memory."""
    return torch.cat((x.new_zeros(elements), x.flatten()))[elements:].view(x.shape)


def mask(shape, device, kind):
    """'holes': a random mask. 'dead': also whole rows without a valid token, and a row of one."""
    if kind == "none":
        return None
    m = torch.rand(shape, device=device) < 0.7
    if kind == "dead" and m.numel():
        rows = m.view(-1, shape[-1])
        rows[::3] = False
        rows[-1, :-1] = False
    return m


def inputs(case, device):
    """(Q, D, q_mask, d_mask) as the operators take them: pairs are [Nq, 1, Ld, d]."""
    per_query = case.layout != "in-batch"
    N = 1 if case.layout == "pairs" else case.N
    documents = (case.Nq, N) if per_query else (N,)
    Q = tokens((case.Nq, case.Lq, case.d), case.dtype, device, case.form)
    D = tokens((*documents, case.Ld, case.d), case.dtype, device, case.form)
    return Q, D, mask(Q.shape[:-1], device, case.masks), mask(D.shape[:-1], device, case.masks)


def call(function, case, Q, D, q_mask, d_mask, **options):
    """maxsim, or maxsim_pairs where the case is pairs; always [Nq, N] scores."""
    import late_interaction

    options = {**case.options, **options}
    if case.layout == "pairs" and function is late_interaction.maxsim:
        squeezed = None if d_mask is None else d_mask.squeeze(1)
        return late_interaction.maxsim_pairs(Q, D.squeeze(1), q_mask, squeezed, **options).unsqueeze(1)
    return function(Q, D, q_mask, d_mask, **options)
