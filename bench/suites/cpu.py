"""The suites of a CPU: libraries, instruction sets and threads. Calls of a shape take turns, so that other
load on the machine slows all of them alike: compare figures within one run only. Documents are there as each
implementation wants them: int8 codes with a scale a token, NumKong's packed matrices."""

import importlib
import statistics
import time
from functools import partial

import torch

import late_interaction as li
from bench.harness.inputs import INT8, Inputs, draw, quantize
from bench.harness.library import EINSUM, GEMM, MAXSIM_CPU, NUMKONG, OURS
from bench.harness.parity import GRADIENTS, SCORES, reference_scores, worst_error
from bench.harness.planted import known_step
from bench.peers.implementations import einsum_maxsim
from late_interaction import codecs
from late_interaction._doctor.checks import relative_error
from late_interaction._doctor.text import error_text
from late_interaction._doctor.timing import QUICK, wall_seconds

CPU = torch.device("cpu")

_REST_S = 0.005  # before each call: idle OpenMP workers of the previous library spin for a while


def rounds_of(b):
    return 3 if b.settings.effort is QUICK else 15


def time_interleaved(calls, rounds, warm=False):
    """Median seconds of each call; every round times each of them once. warm: after another one."""
    times = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            time.sleep(_REST_S)
            if warm:
                call()
            seconds = wall_seconds(call, CPU)
            times[name] += [seconds] if i else []  # the first round warms up
    return {name: statistics.median(t) for name, t in times.items()}


def judge(row, call, wanted):
    """A wrong result is timed too: its row says that it is wrong."""
    if wanted is not None:
        out = call()
        assert isinstance(out, torch.Tensor)
        row["rel_err"] = relative_error(out, wanted)
        if row["rel_err"] > SCORES:
            row["error"] = f"parity: relative error {row['rel_err']:.2g}"


def in_turns(b, rows, prepare, warm=False):
    """Judge the call of each row, and time all of them in turns."""
    calls = {}
    for i, row in enumerate(rows):
        try:
            call, wanted = prepare(row)
            judge(row, call, wanted)
            calls[i] = call
        except ImportError:
            row["skipped"] = "not installed"
        except Exception as error:  # recorded in the row
            row["error"] = error_text(error)
    for i, seconds in time_interleaved(calls, rounds_of(b), warm).items():
        rows[i]["wall_us"] = 1e6 * seconds
        if "gflops" in rows[i]:
            rows[i]["gflops"] = b.shape.flops / seconds * 1e-9
    return list(rows)


def int8_call(shape, one_document=False):
    """The forward of int8 codes, its scores, and the bytes of its documents."""
    x = draw(shape, CPU, torch.float32)
    (Q, q), (D, d) = (quantize(tokens, INT8, per_token=True) for tokens in x.tokens)
    if one_document:
        D, d = D[:1].expand_as(D), d[:1].expand_as(d)
    wanted = reference_scores(shape, Q * q.unsqueeze(-1), D * d.unsqueeze(-1))[0]
    return partial(li.ops.maxsim_quantized, Q, D, q, d, None, None), wanted, D.nbytes


# ---- libraries ----


def _maxsim_cpu(shape, x):
    """One fp32 query at a time is all its API takes."""
    lib = importlib.import_module("maxsim_cpu")
    query, docs = x.Q[0].numpy(), x.D.numpy()
    return lambda: torch.from_numpy(lib.maxsim_scores(query, docs))


def _numkong(shape, x):
    """One query with one document at a time. It returns the sum of distances, 1 minus a similarity each."""
    lib = importlib.import_module("numkong")
    query, *documents = (lib.maxsim_pack(tokens.numpy(), "f32") for tokens in (x.Q[0], *x.D))
    return lambda: shape.Lq - torch.tensor([[lib.maxsim_packed(query, each) for each in documents]])


def _gemm(shape, x):
    """The products without the max, through PyTorch: what the matrix units can give."""
    rows, docs = x.Q.view(-1, shape.d), x.D.view(-1, shape.d).T
    if x.Q.dtype == INT8:
        return partial(torch._int_mm, rows, docs)
    out = torch.empty(rows.shape[0], docs.shape[1], dtype=x.Q.dtype)
    return lambda: torch.mm(rows, docs, out=out)


_CALLS = {
    OURS: lambda shape, x: partial(li.maxsim, *x.tokens),
    MAXSIM_CPU: _maxsim_cpu,
    NUMKONG: _numkong,
    EINSUM: lambda shape, x: partial(einsum_maxsim, *x.tokens, shape.layout),
    GEMM: _gemm,
}


def _forward(b, dtype):
    x = draw(b.shape, CPU, dtype)
    scores = reference_scores(b.shape, *x.tokens)[0]
    names = [n for n in _CALLS if n not in (MAXSIM_CPU, NUMKONG) or dtype == torch.float32]

    def prepare(row):
        return _CALLS[row["impl"]](b.shape, x), None if row["impl"] == GEMM else scores

    return in_turns(b, [b.row(name, "fwd", None, dtype, gflops=None) for name in names], prepare)


def _int8(b):
    """A forward of int8 codes, beside PyTorch's product of such codes."""
    call, wanted, _ = int8_call(b.shape)
    codes = Inputs(
        *(torch.randint(-127, 128, s, dtype=INT8) for s in (b.shape.q_shape, b.shape.d_shape)), wanted
    )
    prepared = {OURS: (call, wanted), GEMM: (_gemm(b.shape, codes), None)}
    rows = [b.row(name, "fwd", None, INT8, gflops=None) for name in prepared]
    return in_turns(b, rows, lambda row: prepared[row["impl"]])


def _step(b, dtype):
    """Forward and both gradients."""
    x = draw(b.shape, CPU, dtype)
    tokens, grad, exact = known_step(b.shape, x.grad_scores, dtype)
    known = Inputs(*tokens, grad)
    x.require_grad()
    known.require_grad()

    def prepare(row):
        def step(x):
            out = _CALLS[row["impl"]](b.shape, x)()
            return torch.autograd.grad(out, x.tokens, x.grad_scores)

        row["grad_err"] = worst_error(step(known), exact)
        if row["grad_err"] > GRADIENTS:
            row["error"] = f"parity: a gradient is off by {row['grad_err']:.2g}"
        return partial(step, x), None

    rows = [b.row(name, "fwd+bwd", None, dtype, winners="uniform", gflops=None) for name in (OURS, EINSUM)]
    return in_turns(b, rows, prepare)


def measure(b):
    if b.shape.Nq > 1:
        return _step(b, torch.float32) + _step(b, torch.bfloat16)
    return _forward(b, torch.float32) + _forward(b, torch.bfloat16) + _int8(b)


# ---- instruction sets, best first ----

X86 = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2")
ISAS = (*X86, "neon_bf16", "neon_dotprod", "neon", "portable")
# Behind the dtypes codes: bits of both sides, and int8 queries with bits or 4-bit codes.
KINDS = ("float32", "bfloat16", "float16", "int8", "hamming", "1bit", "4bit")


_force = torch.ops.late_interaction.cpu_isa


def available():
    found = []
    for name in ISAS:
        try:
            _force(name)
            found.append(name)
        except RuntimeError:  # this CPU or this build has no such table
            continue
    _force("")
    return found


def _call_of_kind(shape, kind):
    """The forward, and the scores that it should give. Of codes the operators, as a first pass calls them;
    queries are quantized before."""
    if kind == "int8":
        return int8_call(shape)[:2]
    x = draw(shape, CPU, getattr(torch, kind, torch.float32))
    if kind == "hamming":
        q, d = (codecs.Bits(1).encode(tokens).values for tokens in x.tokens)
        signs = [2.0 * (tokens > 0) - 1 for tokens in x.tokens]
        return partial(li.ops.maxsim_hamming, q, d, shape.d, None, None), reference_scores(shape, *signs)[0]
    if kind in ("1bit", "4bit"):
        Q, D = codecs.Int8().encode(x.Q), codecs.Bits(int(kind[0])).encode(x.D)
        wanted = reference_scores(shape, *(codes.codec.decode(codes).values for codes in (Q, D)))[0]
        args = Q.values, D.values, Q.scales, D.scales, None, None, D.codec.nbits
        return partial(li.ops.maxsim_asymmetric, *args), wanted
    return partial(li.maxsim, *x.tokens), reference_scores(shape, *x.tokens)[0]


def measure_isa(b):
    calls = {kind: _call_of_kind(b.shape, kind) for kind in KINDS}
    rows = [
        b.row(OURS, "fwd", name, INT8, gflops=None) | {"dtype": kind}
        for kind in KINDS
        for name in available()
    ]

    def prepare(row):
        name, (call, wanted) = row["variant"], calls[row["dtype"]]

        def forced():
            _force(name)
            return call()

        return forced, wanted

    try:
        return in_turns(b, rows, prepare)
    finally:
        _force("")


# ---- threads: from memory, and on one document that stays in the caches; small calls, which come apart ----

MEMORY, CACHE, READ, APART = "memory", "cache", "read", "apart"
READER = "torch read"
THREADS = (MEMORY, CACHE, READ, APART)
_WARM, _MORE = 2, 3  # calls are short: more of them than other suites take


def thread_counts():
    most = torch.get_num_threads()
    powers = [1 << n for n in range(most.bit_length())]
    return [*(n for n in powers if n < most), most]


def _by_threads(b, call, wanted, size, dtype, variant):
    """A row for each count of threads; size: of what is read from memory, or 0."""
    rows, rest_s, most = [], _REST_S if variant == APART else 0.0, torch.get_num_threads()
    try:
        for threads in thread_counts():
            torch.set_num_threads(threads)
            impl, op = (READER, "read") if variant == READ else (OURS, "fwd")
            row = b.row(impl, op, variant, dtype, gflops=None, gbps=None, threads=threads)
            judge(row, call, wanted)
            times = []
            for _ in range(_WARM + _MORE * rounds_of(b)):
                time.sleep(rest_s)
                times.append(wall_seconds(call, CPU))
            seconds = statistics.median(times[_WARM:])
            row["wall_us"], row["least_us"] = 1e6 * seconds, 1e6 * min(times[_WARM:])
            row["gflops"] = b.shape.flops / seconds * 1e-9 if wanted is not None else None
            row["gbps"] = size / seconds * 1e-9 if size else None
            rows.append(row)
    finally:
        torch.set_num_threads(most)
    return rows


def measure_threads(b):
    """Our forward with 1, 2, 4, ... threads, beside a plain read of as many bytes as bf16 documents have."""
    shape = b.shape
    if shape.name.startswith("cpu-small"):
        x = draw(shape, CPU, torch.bfloat16)
        wanted = reference_scores(shape, *x.tokens)[0]
        return _by_threads(b, partial(li.maxsim, *x.tokens), wanted, 0, torch.bfloat16, APART)
    rows = []
    for dtype in (torch.float32, torch.bfloat16, INT8):
        for variant in (MEMORY, CACHE):
            if dtype == INT8:
                call, exact, size = int8_call(shape, variant == CACHE)
            else:
                x = draw(shape, CPU, dtype)
                D = x.D[:1].expand_as(x.D) if variant == CACHE else x.D  # all are the first, by a stride of 0
                call, exact, size = partial(li.maxsim, x.Q, D), reference_scores(shape, x.Q, D)[0], D.nbytes
            rows += _by_threads(b, call, exact, size if variant == MEMORY else 0, dtype, variant)
    numbers = torch.rand(shape.input_bytes(2) // 8 * 2)
    reads = (
        _by_threads(b, call, None, numbers.nbytes, torch.float32, READ)
        for call in (numbers.sum, partial(torch.dot, *numbers.chunk(2)))
    )
    return rows + [min(pair, key=lambda row: float(row["least_us"])) for pair in zip(*reads, strict=True)]
