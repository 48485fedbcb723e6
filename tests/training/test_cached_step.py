"""cached_contrastive_step against one step over the whole batch."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import late_interaction as li
from late_interaction.fused_head import maxsim_from_hidden


class Encoder(nn.Module):
    """Tokens -> embeddings, with dropout: random numbers matter."""

    def __init__(self, dropout=0.3):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 8))

    def forward(self, part):
        return self.layers(part[0]), self.layers(part[1])


def parts_of(device, sizes=(3, 2, 4), dtype=torch.float64):
    return [tuple(torch.randn(n, L, 12, dtype=dtype, device=device) for L in (4, 6)) for n in sizes]


def loss_fn(Q, D, *masks):
    q_mask, d_mask = masks or (None, None)
    q, d = li.Tokens(Q, q_mask), li.Tokens(D, d_mask)
    return li.losses.contrastive(q, d, temperature=0.2, normalize=True)


def whole(encode, parts, loss=loss_fn):
    return loss(*(torch.cat(x) for x in zip(*map(encode, parts), strict=True)))


def plain_step(encoder, parts, loss=loss_fn):
    value = whole(encoder, parts, loss)
    value.backward()
    return value.detach()


def grads(module):
    return [p.grad for p in module.parameters()]


def compare(plain, encode, parts, loss, trained, **options):
    """A cached step against ``plain()``, the loss of the whole batch: the value, the gradients of what is
    trained, and the random number that comes next."""
    found = []
    for step in (plain, lambda: li.cached_contrastive_step(encode, parts, loss, **options)):
        torch.manual_seed(3)
        value = step()
        if step is plain:
            value.backward()
        found.append([value, *(p.grad for p in trained), torch.rand(())])
        for p in trained:
            p.grad = None
    assert not value.requires_grad
    torch.testing.assert_close(found[1], [found[0][0].detach(), *found[0][1:]], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_equals_one_step(device, dropout):
    encoder, parts = Encoder(dropout).double().to(device), parts_of(device)
    compare(lambda: whole(encoder, parts), encoder, parts, loss_fn, [*encoder.parameters()])


class Drawing(nn.Module):
    """An encoder that multiplies its embeddings with random numbers from ``draw``."""

    def __init__(self, draw):
        super().__init__()
        self.encoder, self.draw, self.drawn = Encoder(0.0).double(), draw, []

    def forward(self, part):
        self.drawn.append(self.draw())
        return tuple(self.drawn[-1] * x for x in self.encoder(part))


def sources():
    """What draws a number, and the generators that the step is told of."""
    own = torch.Generator().manual_seed(1)
    of_numpy, of_old_numpy, of_python = np.random.default_rng(1), np.random.RandomState(1), random.Random(1)
    return {
        "torch": (lambda: torch.rand(()).item(), ()),
        "torch.Generator": (lambda: torch.rand((), generator=own).item(), (own,)),
        "numpy.random": (np.random.rand, ()),
        "numpy.random.Generator": (of_numpy.random, (of_numpy,)),
        "numpy.random.RandomState": (of_old_numpy.rand, (of_old_numpy,)),
        "random": (random.random, ()),
        "random.Random": (of_python.random, (of_python,)),
        "several": (lambda: of_numpy.random() * of_python.random(), [of_python, of_numpy]),
    }


@pytest.mark.parametrize("source", sources())
def test_random_numbers_come_again_and_generators_go_on_as_after_one_forward(source):
    draw, generators = sources()[source]
    module, parts = Drawing(draw), parts_of("cpu")
    seeds = random.getstate(), np.random.get_state(), torch.get_rng_state()
    np.random.seed(0), random.seed(0), torch.manual_seed(0)
    value = li.cached_contrastive_step(module, parts, loss_fn, generators=generators)
    after = draw()
    draw, _ = sources()[source]
    plain = Drawing(draw)
    plain.encoder.load_state_dict(module.encoder.state_dict())
    np.random.seed(0), random.seed(0), torch.manual_seed(0)
    torch.testing.assert_close(value, plain_step(plain, parts))
    assert plain.drawn == module.drawn[:3] == module.drawn[3:] and len(set(plain.drawn)) == 3
    assert draw() == after
    torch.testing.assert_close(grads(module), grads(plain))
    random.setstate(seeds[0]), np.random.set_state(seeds[1]), torch.set_rng_state(seeds[2])


@pytest.mark.parametrize("generators", [torch.Generator(), [3], ["cpu"], [None]])
def test_generators_that_are_none(generators):
    message = "generators must (be a sequence of generators|hold torch.Generator, .*), got "
    with pytest.raises(TypeError, match=message):
        li.cached_contrastive_step(Encoder(), parts_of("cpu"), loss_fn, generators=generators)


def test_gradients_are_scaled_and_added(device):
    encoder, parts = Encoder(0.0).double().to(device), parts_of(device)
    value = li.cached_contrastive_step(encoder, parts, loss_fn)
    once = [g.clone() for g in grads(encoder)]
    scaled = li.cached_contrastive_step(encoder, parts, loss_fn, scale=lambda x: 1024 * x)
    torch.testing.assert_close(scaled, value)
    torch.testing.assert_close(grads(encoder), [1025 * g for g in once])


def test_parameters_of_the_loss_get_gradients(device):
    encoder, parts = Encoder(0.0).double().to(device), parts_of(device)
    module = li.losses.Contrastive(temperature=0.2, learnable=True, normalize=True).double().to(device)
    trained = *encoder.parameters(), module.log_temperature
    compare(lambda: whole(encoder, parts, module), encoder, parts, module, trained)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_hidden_states_are_projected_in_the_loss(device, dropout):
    """Documents leave the encoder as hidden states: maxsim_from_hidden projects them on the way, and the head
    gets its gradient from the loss alone."""
    encoder = Encoder(dropout).double().to(device)
    parts, head = parts_of(device), nn.Linear(16, 8, bias=False).double().to(device)

    def encode(part):
        return encoder(part)[0], encoder.layers[:3](part[1])

    def loss(Q, hidden):
        scores = maxsim_from_hidden(Q, hidden, head.weight, normalize=True)
        return nn.functional.cross_entropy(scores / 0.2, torch.arange(len(Q), device=device))

    def plain():
        Q, hidden = (torch.cat(x) for x in zip(*map(encode, parts), strict=True))
        return li.losses.contrastive(Q, nn.functional.normalize(head(hidden), dim=-1), temperature=0.2)

    compare(plain, encode, parts, loss, (*encoder.parameters(), head.weight), module=encoder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(device, dtype):
    """Casts of weights that were cached without a graph must not end the second pass's gradients."""
    encoder = Encoder(0.0).to(device)
    other, parts = copy.deepcopy(encoder), parts_of(device, dtype=torch.float32)
    with torch.autocast(device, dtype=dtype):
        plain = plain_step(encoder, parts)
        cached = li.cached_contrastive_step(other, parts, loss_fn)
    torch.testing.assert_close(cached, plain)
    for got, want in zip(grads(other), grads(encoder), strict=True):
        assert got is not None
        torch.testing.assert_close(got, want, rtol=0, atol=0.02 * want.abs().max().item())


def test_parts_of_unequal_lengths_are_padded(device):
    encoder = Encoder(0.0).double().to(device)
    lengths = ((4, 6), (2, 9), (5, 3))
    parts = [
        tuple(torch.randn(2, L, 12, dtype=torch.float64, device=device) for L in both) for both in lengths
    ]

    def encode(part):
        Q, D = encoder(part)
        masks = (torch.ones(x.shape[:2], dtype=torch.bool, device=device) for x in (Q, D))
        return Q, D, *masks

    def plain():
        Q, D = ([x for part in parts for x in encoder(part)[i]] for i in (0, 1))
        return li.losses.contrastive(Q, D, temperature=0.2, normalize=True)

    compare(plain, encode, parts, loss_fn, [*encoder.parameters()])


def test_outputs_of_one_and_two_dims_with_gradients(device):
    """Weights [b, L] of padded queries, of two lengths, and a number for each query."""
    encoder = nn.Linear(12, 8).double().to(device)
    parts = [torch.randn(2, L, 12, dtype=torch.float64, device=device) for L in (4, 2, 4)]

    def encode(part):
        Q = encoder(part)
        return Q, Q.square().mean(2), Q.sum((1, 2))

    def loss(Q, weights, numbers):
        assert Q.shape == (6, 4, 8) and weights.shape == (6, 4) and numbers.shape == (6,)
        return (Q.sum(2).tanh() * weights).sum() + numbers.sin().sum()

    def plain():
        padded = [nn.functional.pad(x, (0, 0, 0, 4 - x.shape[1])) for x in map(encoder, parts)]
        outputs = [encode(part) for part in parts]
        weights = [nn.functional.pad(x[1], (0, 4 - x[1].shape[1])) for x in outputs]
        return loss(torch.cat(padded), torch.cat(weights), torch.cat([x[2] for x in outputs]))

    compare(plain, encode, parts, loss, [*encoder.parameters()], module=encoder)


def test_outputs_without_a_graph_and_outputs_that_no_loss_takes(device):
    encoder, parts = Encoder(0.0).double().to(device), parts_of(device)

    def loss(Q, D, numbers, _):
        return loss_fn(Q, D) * numbers.square().mean()

    def encode(part):
        Q, D = encoder(part)
        return Q, D, torch.full((len(Q),), 2.0, dtype=Q.dtype, device=device), Q.exp()

    compare(lambda: whole(encode, parts, loss), encode, parts, loss, [*encoder.parameters()])


def test_an_encoder_that_does_not_learn(device):
    encoder, parts = Encoder(0.0).requires_grad_(False).to(device), parts_of(device, dtype=torch.float32)
    module = li.losses.Contrastive(temperature=0.2, learnable=True, normalize=True).to(device)
    li.cached_contrastive_step(encoder, parts, module)
    assert module.log_temperature.grad.abs() > 0 and all(g is None for g in grads(encoder))


def test_packed_outputs(device):
    """Queries and documents of a part have different numbers of tokens, and so have the parts."""
    encoder = Encoder(0.0).double().to(device)
    lengths = (((3, 1), (5, 2)), ((4,), (1,)), ((2, 5), (6, 4)))
    parts = [
        tuple(torch.randn(sum(each), 12, dtype=torch.float64, device=device) for each in both)
        + tuple(torch.tensor(each, dtype=torch.int32, device=device) for each in both)
        for both in lengths
    ]

    def loss(Q, D, *lengths):
        cu_q, cu_d = (nn.functional.pad(x.cumsum(0, dtype=torch.int32), (1, 0)) for x in lengths)
        return li.losses.contrastive(li.Tokens.packed(Q, cu_q), li.Tokens.packed(D, cu_d), temperature=0.2)

    def encode(part):
        return *encoder(part), *part[2:]

    compare(lambda: whole(encode, parts, loss), encode, parts, loss, [*encoder.parameters()])


def test_with_checkpointing(device):
    from torch.utils.checkpoint import checkpoint

    encoder, parts = Encoder(0.5).double().to(device), parts_of(device)

    def encode(part):
        return tuple(checkpoint(encoder.layers, x, use_reentrant=False) for x in part)

    compare(lambda: whole(encoder, parts), encode, parts, loss_fn, [*encoder.parameters()])


def test_no_graph_outlives_its_part():
    """The second pass's activations are gone before the next part's begin."""
    encoder, alive, most = Encoder(0.0), [0], [0]

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            alive[0] += torch.is_grad_enabled() or x.requires_grad
            most[0] = max(most[0], alive[0])
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            alive[0] -= 1
            return grad

    def encode(part):
        Q, D = encoder(part)
        return (Counted.apply(Q), D) if torch.is_grad_enabled() else (Q, D)

    li.cached_contrastive_step(encode, parts_of("cpu", (2, 2, 2, 2), torch.float32), loss_fn)
    assert most[0] == 1 and alive[0] == 0


def test_distributed_modules_send_their_gradients_once():
    class Data(Encoder):  # what DistributedDataParallel has
        def no_sync(self):
            log.append("no_sync")
            import contextlib

            return contextlib.nullcontext()

    class Sharded(Encoder):  # what FSDP2 has
        def set_requires_gradient_sync(self, wanted):
            log.append(wanted)

    # Data waits in the backward of the loss, and in those of the first two parts.
    for module, wanted in ((Data(), ["no_sync"] * 3), (Sharded(), [False, True, False, True, True, True])):
        log = []
        parts = parts_of("cpu", dtype=torch.float32)
        li.cached_contrastive_step(module, parts, loss_fn)
        assert log == wanted
        log.clear()
        li.cached_contrastive_step(lambda part: module(part), parts, loss_fn, module=module)  # noqa: B023
        assert log == wanted


ROWS = torch.ones(2, 3, 4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"encoder": None}, TypeError, "encoder must be callable, got None"),
        (
            {"encoder": lambda x: {}},
            TypeError,
            "encoder must return a tensor or a tuple of tensors, got dict",
        ),
        ({"encoder": lambda x: torch.tensor(1.0)}, ValueError, "0-dim"),
        ({"encoder": lambda n: (ROWS,) * n, "batches": [1, 2]}, ValueError, "as many tensors for every part"),
        ({"batches": []}, ValueError, "batches must hold at least one part"),
        ({"loss": None}, TypeError, "loss must be callable, got None"),
        ({"scale": 1024}, TypeError, "scale must be callable, got 1024"),
        ({"batches": 5}, TypeError, "batches must be a sequence of parts, got 5"),
        ({"loss": lambda Q: 1.0}, TypeError, r"loss must return a torch\.Tensor, got 1\.0"),
        ({"scale": lambda x: 2.0}, TypeError, r"scale must return a torch\.Tensor, got 2\.0"),
        ({"loss": lambda Q: Q.sum((1, 2))}, ValueError, r"loss must return one number, .* got \[2\]"),
        ({"scale": lambda x: x.expand(3)}, ValueError, r"scale must return one number, .* got \[3\]"),
        ({"loss": lambda Q: Q[:0, 0, 0]}, ValueError, r"loss must return one number, .* got \[0\]"),
        ({"batches": [ROWS, ROWS[..., 1:]]}, ValueError, "first two dims alone"),
        ({"batches": [ROWS[..., 1:], ROWS]}, ValueError, "first two dims alone"),
        ({"batches": [ROWS[..., 0], ROWS[:, 0, 0]]}, ValueError, r"dims alone, got \[2, 3\], \[2\]$"),
        ({"batches": [ROWS[:, 0, 0], ROWS[..., 0]]}, ValueError, r"dims alone, got \[2\], \[2, 3\]$"),
        ({"batches": [ROWS[..., :1], *[ROWS] * 5]}, ValueError, r"got \[2, 3, 1\](, \[2, 3, 4\]){3}$"),
    ],
)
def test_refusals(change, error, message):
    given = {"encoder": lambda x: x.clone().requires_grad_(), "batches": [ROWS], "loss": lambda Q: Q.sum()}
    given |= change
    with pytest.raises(error, match=message):
        li.cached_contrastive_step(given.pop("encoder"), given.pop("batches"), given.pop("loss"), **given)


def test_an_encoder_that_returns_less_when_it_runs_again():
    def encode(part):
        return (part * weight,) * (1 + (not torch.is_grad_enabled()))

    weight = torch.ones(4, requires_grad=True)
    with pytest.raises(ValueError, match="zip"):
        li.cached_contrastive_step(encode, [ROWS], lambda Q, D: (Q * D).sum())
