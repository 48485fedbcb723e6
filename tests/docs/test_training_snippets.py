"""What the pages and docstrings teach about training, on data of which something can be learned.

Every block of Python that ends in a loss is run as it stands, again and again: `torch.randn` gives it planted
tokens, and an optimizer moves its leaves and modules. A temperature that saturates the softmax has a loss of
0 from the first step, and no gradient.
"""

import ast
import doctest
import inspect
import math
import re
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import normalize

import late_interaction as li
from tests.build.test_readme import PAGES, own_examples

STEPS, LEARNING_RATE = 60, 0.05
LOSSES = li.losses.__all__


@dataclass
class Planted:
    """Draws tokens in place of `torch.randn`: unit vectors, of which the first of the i-th document drawn are
    near those of the i-th query. What they share lies in some of the dims, so that a map can learn to keep
    it. A block that runs again gets the tensors of its first run."""

    shared: float  # the squared length of what a document's token shares with its query's
    drawn: list[torch.Tensor] = field(default_factory=list)
    rows: Counter = field(default_factory=Counter)  # by the shape of an item, in one statement
    at: int = 0

    def __call__(self, *size, requires_grad=False, generator=None):
        shape = tuple(size[0]) if size and isinstance(size[0], (tuple, list, torch.Size)) else size
        if self.at == len(self.drawn):
            self.drawn.append(self.draw(shape).requires_grad_(requires_grad))
        self.at += 1
        return self.drawn[self.at - 1]

    def draw(self, shape):
        noise = torch.zeros(shape).normal_()
        if len(shape) not in (2, 3) or shape[-1] < 2:  # candidates, scores of a teacher: nothing to find
            return normalize(noise, dim=-1) if len(shape) > 2 else noise
        # A sequence alone is one more item of its list; those of a batch count up together.
        key = shape[-1] if len(shape) == 2 else shape[1:]
        items = noise.view(-1, *shape[-2:])
        some = max(1, shape[-1] // 4)
        for i, item in enumerate(items, self.rows[key]):
            item.copy_(normalize(item, dim=-1))
            theme = torch.empty(32, some).normal_(generator=torch.Generator().manual_seed(i))
            theme = normalize(theme, dim=-1)[: len(item)] * math.sqrt(self.shared)
            item[: len(theme), :some] = theme
            item[: len(theme), some:] = normalize(item[: len(theme), some:], dim=-1) * math.sqrt(
                1 - self.shared
            )
        self.rows[key] += len(items)
        return noise


@dataclass
class Watch:
    """Takes the place of `Tensor.backward`: the value of every loss, and the leaves that it depends on."""

    backward: object
    values: list[float] = field(default_factory=list)
    leaves: dict[int, torch.Tensor] = field(default_factory=dict)

    def __call__(self, loss, *args, **kwargs):
        self.values.append(loss.item())
        nodes, seen = [loss.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if (leaf := getattr(node, "variable", None)) is not None:
                self.leaves[id(leaf)] = leaf
            nodes += [following for following, _ in node.next_functions]
        return self.backward(loss, *args, **kwargs)


def is_loss(statement):
    return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "loss"


def statements(block):
    """The statements of a block, each backward beside its loss; a loss without one gets it."""
    out = []
    body = ast.parse(block).body
    for i, statement in enumerate(body):
        following = ast.unparse(body[i + 1]) if i + 1 < len(body) else ""
        if is_loss(statement) and following == "loss.backward()":
            out.append([statement, body[i + 1]])
        elif is_loss(statement) and "cached_contrastive_step" not in ast.unparse(statement):
            out.append([statement, *ast.parse("loss.backward()").body])
        elif ast.unparse(statement) != "loss.backward()":
            out.append([statement])
    return out


def source(statement):
    return "\n".join(map(ast.unparse, statement))


def trains(text):
    return not text.startswith(("def ", "@", "import ", "from ")) and (
        "backward()" in text or re.search(r"= (li\.)?cached_contrastive_step", text)
    )


def losses_of(name, blocks):
    """(page, number of the block, number of the statement) of each loss that blocks train with."""
    for number, block in enumerate(blocks):
        for i, statement in enumerate(statements(block)):
            text = source(statement)
            # Weights alone get a gradient there; and a function that is compiled again would take seconds.
            if trains(text) and "scores.sum()" not in text and "@torch.compile" not in block:
                yield pytest.param(blocks[: number + 1], i, id=f"{name}: {text.splitlines()[0][:60]}")


def docstring_example(name):
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(getattr(li.losses, name)))
    lines = [example.source for example in examples]
    if name[0].isupper():  # its example calls an instance
        lines = [line.replace("loss_fn(Q, D).backward()", "loss = loss_fn(Q, D)") for line in lines]
    return "".join(lines)


def all_losses():
    for page in PAGES:
        yield from losses_of(page, own_examples(page))
    for name in LOSSES:
        yield from losses_of(name, [docstring_example(name)])


def least(text):
    """The value that a loss has for documents that all rank first."""
    if "losses.recall" not in text and "losses.Recall" not in text:
        return 0.0
    given = re.search(r"k=\(([\d, ]+)\)", text)
    k = [int(x) for x in given[1].split(",")] if given else [1, 2, 4, 8, 16]
    return 1 - sum(1 / (1 + math.exp(1 - x)) for x in k) / len(k)


class Trained:
    """A block that is run again and again up to one of its losses."""

    def __init__(self, blocks, at, monkeypatch):
        *before, block = blocks
        self.statements = statements(block)[: at + 1]
        last = source(self.statements[-1])
        self.least = least(block if "loss_fn" in last else last)
        # A recall's steps are flat where every document ranks first already; a map loses of what is shared.
        self.planted = Planted(shared=0.2 if self.least else 0.85 if "encoder(" in block else 0.45)
        self.watch = Watch(torch.Tensor.backward)
        monkeypatch.setattr(torch, "randn", lambda *size, **options: self.planted(*size, **options))
        monkeypatch.setattr(torch.Tensor, "backward", lambda *args, **kwargs: self.watch(*args, **kwargs))
        self.names, self.kept = {}, {}
        for earlier in before:
            for statement in statements(earlier):
                self.planted.rows.clear()
                exec(source(statement), self.names)
        self.at_start = self.planted.at
        self.optimizer = None

    def step(self):
        """Runs the block once, and moves what its last loss depends on. Returns the loss and the largest
        gradient."""
        self.planted.at = self.at_start
        for statement in self.statements:
            names_something = not isinstance(statement[0], ast.Expr)
            if self.optimizer and not names_something and statement is not self.statements[-1]:
                continue  # such as sharding a module: it is done
            if statement is self.statements[-1]:
                self.watch.values, self.watch.leaves = [], {}
                for x in self.trained():
                    x.grad = None
            self.planted.rows.clear()
            before = dict(self.names)
            exec(source(statement), self.names)
            self.keep(before)
        if self.optimizer is None:
            found = {id(x): x for x in [*self.watch.leaves.values(), *self.trained()] if x.grad is not None}
            self.optimizer = torch.optim.Adam(list(found.values()), lr=LEARNING_RATE)
        moved = [x for group in self.optimizer.param_groups for x in group["params"] if x.grad is not None]
        largest = max(x.grad.abs().max().item() for x in moved)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.watch.values[-1], largest

    def trained(self):
        """The modules' parameters and the leaves that the block's names hold."""
        for value in list(self.names.values()):
            if isinstance(value, torch.nn.Module):
                yield from value.parameters()
            elif isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad:
                yield value
        yield from (x for x in self.planted.drawn if x.requires_grad)

    def keep(self, before):
        """A name that was bound anew holds the module or leaf of the first run, which has been trained."""
        for name, value in self.names.items():
            if before.get(name) is value:
                continue
            leaf = isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad
            if leaf or isinstance(value, torch.nn.Module):
                self.names[name] = self.kept.setdefault(name, value)


@pytest.fixture
def no_group():
    """What a page begins, and ends in a block that does not run."""
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize("blocks, at", list(all_losses()))
def test_what_is_taught_trains(blocks, at, monkeypatch):
    torch.manual_seed(0)
    block = Trained(blocks, at, monkeypatch)
    first, gradient = block.step()
    assert math.isfinite(first) and first > 0, f"the first loss is {first}"
    assert gradient > 1e-6, f"the largest gradient is {gradient}"
    for _ in range(STEPS):
        loss, _ = block.step()
        if loss - block.least < (first - block.least) / 2:
            return
    raise AssertionError(f"the loss was {first}, and is {loss} after {STEPS} steps")
