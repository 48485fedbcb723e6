"""Blocks that a loss keeps from its forward to its backward: what they change (how often blocks are scored)
and what they do not (a single bit of the result), and how much memory they may take."""

import weakref

import pytest
import torch

import late_interaction as li
from late_interaction import _host_memory as host_memory
from late_interaction._contrastive import blocks as kept
from late_interaction._contrastive.kernels import Kernels
from tests.support.contrastive import Made, assert_same, batch, gradients, small_blocks

T = 0.3
NQ, ND, LQ = 10, 13, 5
ALL = NQ * ND * (2 * LQ + 4)  # bytes of float32 inputs' scores and winners
LOSSES = {
    "contrastive": li.losses.contrastive,
    "symmetric": lambda Q, D, **o: li.losses.contrastive(Q, D[:NQ], symmetric=True, **o),
    "sigmoid": li.losses.sigmoid,
    "recall": li.losses.recall,
}


@pytest.fixture
def scored(monkeypatch):
    """How often blocks have been scored with their winners."""
    calls, ours = [], Kernels.scores_and_winners
    monkeypatch.setattr(Kernels, "scores_and_winners", lambda *args: calls.append(0) or ours(*args))
    return calls


def backward_of(loss, leaves, scored):
    """Loss and gradients, and how many blocks the backward scores."""
    scored.clear()
    return gradients(loss, leaves), len(scored)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [False, True])
def test_a_budget_changes_time_and_no_bit(device, scored, masked, dtype):
    Q, D = batch(NQ, ND, LQ, dtype=dtype, device=device)
    q_mask = torch.rand(NQ, LQ, device=device) < 0.7 if masked else None
    found = []
    with small_blocks():
        for kept_bytes in (0, ALL // 3, ALL - 1):
            loss = li.losses.contrastive(li.Tokens(Q, q_mask), D, temperature=T, kept_bytes=kept_bytes)
            found.append(backward_of(loss, (Q, D), scored))
    (all_again, every), (some_again, some), (few_again, few) = found
    assert_same(all_again, some_again)
    assert_same(all_again, few_again)
    assert every > some > few > 0


def with_saved_bytes(function, *args, **options):
    """What a forward returned, and the bytes that it saves for its backward."""
    saved = []

    def pack(x):
        saved.append(x.nbytes)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        return function(*args, **options), sum(saved)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("Ld", "each"), [(7, 2), (70_000, 4)])  # bytes that hold any token's place
def test_kept_blocks_take_what_was_granted_and_no_more(scored, Ld, each, packed):
    Q, D = batch(3, 4, LQ, Ld, 2, torch.float32)
    q, d = (li.Tokens(x).pack() if packed else x for x in (Q, D))
    pair, beside = LQ * each + 4, 0
    for granted, blocks in ((0, 0), (6 * pair - 1, 5), (6 * pair, 6)):
        with small_blocks(1):
            loss, taken = with_saved_bytes(li.losses.contrastive, q, d, temperature=T, kept_bytes=granted)
            beside = beside or taken
            assert taken - beside == blocks * pair
            assert backward_of(loss, (Q, D), scored)[1] == 3 * 4 - blocks


@pytest.mark.parametrize("panel", [8, 1])  # several blocks of documents in a panel, or one
@pytest.mark.parametrize("name", LOSSES)
def test_a_cpu_keeps_blocks_where_memory_is_available(scored, name, panel):
    Q, D = batch(NQ, ND, LQ, dtype=torch.float32)
    found = []
    for available in (0, ALL // 2, 1 << 30):
        with small_blocks(panel=panel, available=available):
            found.append(backward_of(LOSSES[name](Q, D, temperature=T), (Q, D), scored))
    (all_again, every), (some_again, some), (none_again, none) = found
    assert_same(all_again, some_again)
    assert_same(all_again, none_again)
    assert every > some > none == 0


def test_half_of_the_available_memory_may_be_kept(scored):
    Q, D = batch(NQ, ND, LQ, dtype=torch.float32)
    for available, again in ((2 * ALL - 1, 1), (2 * ALL, 0)):
        with small_blocks(NQ + ND, available=available):
            assert backward_of(li.losses.contrastive(Q, D, temperature=T), (Q, D), scored)[1] == again


def test_a_panel_holds_as_many_blocks_as_fit():
    """Panels of two blocks are half as many as those of one, and cost half of what these cost beside one."""
    Q, D = batch(3, 60, dtype=torch.float32)
    made = []
    for panel in (60, 6, 3):  # documents
        with small_blocks(3, panel=panel), torch.no_grad(), Made() as seen:
            li.losses.contrastive(Q, D, temperature=T)
        made.append(len(seen.bytes))
    one, of_two_blocks, of_one_block = made
    assert of_two_blocks - one <= 0.6 * (of_one_block - one)


def test_a_block_of_pairs_stays_within_its_share(monkeypatch):
    """Also where the fewest documents that a block has are too many for all queries."""
    made, ours = [], Kernels.scores_and_winners
    monkeypatch.setattr(Kernels, "scores_and_winners", lambda *args: made.append(ours(*args)) or made[-1])
    Q, D = batch(256, 256, 2, 3, 4, torch.float32)
    with small_blocks(4), monkeypatch.context() as patch:
        patch.setattr(kept, "_CPU_SHARES", (1 << 30, 1 << 30, 3 << 10))
        li.losses.contrastive(Q, D, temperature=T).backward()
    assert 1 << 10 < max(scores.nbytes + winners.nbytes for scores, winners in made) <= 3 << 10


def test_packed_blocks_are_kept(scored):
    Q, D = (torch.randn(n, 8, requires_grad=True) for n in (31, 44))
    cu_q = torch.tensor([0, 4, 4, 9, 20, 31], dtype=torch.int32)
    cu_d = torch.tensor([0, 7, 20, 20, 30, 44], dtype=torch.int32)
    q, d = li.Tokens.packed(Q, cu_q), li.Tokens.packed(D, cu_d)
    found = []
    for available in (0, 1 << 30):
        with small_blocks(2, available=available):
            found.append(backward_of(li.losses.contrastive(q, d, temperature=T), (Q, D), scored))
    assert_same(found[0][0], found[1][0])
    assert found[1][1] == 0


def test_lists_of_pairs_and_losses_without_a_backward_keep_no_blocks(monkeypatch):
    monkeypatch.setattr(kept.KeptBlocks, "keep", lambda *args: pytest.fail("a block is kept"))
    Q, D = batch(NQ, ND, LQ, dtype=torch.float32)
    with small_blocks(available=1 << 30):
        li.losses.pairwise(Q, D, temperature=T).backward()
        li.losses.contrastive(Q, D, temperature=T, tail=2.0**-10).backward()
        with torch.no_grad():
            li.losses.contrastive(Q, D, temperature=T)


def test_sums_over_listed_pairs_fill_their_share(monkeypatch):
    """Float32 sums of 7 x 8 numbers for each bfloat16 document: eight of them take 1,792 of 2,000 bytes."""
    monkeypatch.setattr(kept, "_WINNER_BYTES", 80)
    Q, D = batch(9, 40, LQ, dtype=torch.bfloat16)
    with small_blocks():
        loss = li.losses.contrastive(Q, D, temperature=T, tail=1e-9)
        with Made() as seen:
            loss.backward()
    assert max(n for n in seen.elements if n % 56 == 0 and n < D.numel()) == 8 * 56


def test_blocks_are_freed_with_the_backward(device):
    """Also while somebody holds the loss, as a list of losses does."""
    Q, D = batch(NQ, ND, LQ, dtype=torch.float32, device=device)
    found, keep = [], kept.KeptBlocks.keep

    def watch(self, rows, columns, scores, winners):
        found.append(weakref.ref(winners))
        keep(self, rows, columns, scores, winners)

    with small_blocks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept.KeptBlocks, "keep", watch)
        loss = li.losses.contrastive(Q, D, temperature=T, kept_bytes=ALL - 1)
        assert found and any(x() is not None for x in found)
        loss.backward()
    assert all(x() is None for x in found) and loss.item() > 0


def test_a_backward_may_be_repeated(device):
    Q, D = batch(NQ, ND, LQ, dtype=torch.float32, device=device)
    with small_blocks():
        loss = li.losses.contrastive(Q, D, temperature=T, kept_bytes=ALL - 1)
        first = torch.autograd.grad(loss, (Q, D), retain_graph=True)
        assert all(map(torch.equal, first, torch.autograd.grad(loss, (Q, D))))


# ---- what is available ----


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = {"proc/meminfo": "MemTotal:  2000 kB\nMemFree:  10 kB\nMemAvailable:    1000 kB\n"}


def test_memory_without_control_groups(tmp_path):
    assert host_memory.available_bytes(tmp_path) == 0
    write(tmp_path, MEMINFO)
    assert host_memory.available_bytes(tmp_path) == 1000 << 10
    write(tmp_path, {"proc/self/cgroup": "0::/a\n"})  # whose files are not here
    assert host_memory.available_bytes(tmp_path) == 1000 << 10


def test_memory_within_control_groups(tmp_path):
    top = "sys/fs/cgroup/"
    write(tmp_path, MEMINFO | {
        "proc/self/cgroup": "0::/a/b\n",
        top + "a/memory.max": "600000\n", top + "a/memory.current": "500000\n",
        top + "a/memory.stat": "anon 1\ninactive_file 30000\n",
        top + "a/b/memory.max": "max\n", top + "a/b/memory.current": "400000\n",
    })  # fmt: skip
    assert host_memory.available_bytes(tmp_path) == 130000  # of the group around its own
    write(tmp_path, {top + "a/b/memory.max": "400001\n"})
    assert host_memory.available_bytes(tmp_path) == 1
    write(tmp_path, {top + "a/b/memory.max": "1\n"})
    assert host_memory.available_bytes(tmp_path) == 0


def test_memory_within_the_groups_around_a_group(tmp_path):
    """All of them count: also the outermost one, and one with a colon in its name."""
    top = "sys/fs/cgroup/"
    write(tmp_path, MEMINFO | {"proc/self/cgroup": "0::/a/b:c/d/e\n"})
    for used, group in ((100, "a/b:c/d/e/"), (200, "a/b:c/d/"), (300, "a/b:c/"), (400, "a/"), (500, "")):
        write(tmp_path, {f"{top}{group}memory.max": "1000\n", f"{top}{group}memory.current": f"{used}\n"})
        assert host_memory.available_bytes(tmp_path) == 1000 - used
    write(tmp_path, {"proc/self/cgroup": "0::/\n"})
    assert host_memory.available_bytes(tmp_path) == 500


def test_memory_within_control_groups_of_version_1(tmp_path):
    top = "sys/fs/cgroup/memory/"
    write(tmp_path, MEMINFO | {
        "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n",
        top + "memory.limit_in_bytes": "9223372036854771712\n", top + "memory.usage_in_bytes": "7\n",
    })  # fmt: skip
    assert host_memory.available_bytes(tmp_path) == 1000 << 10
    files = {"memory.limit_in_bytes": "5000\n", "memory.usage_in_bytes": "3000\n",
             "memory.stat": "inactive_file 9\ntotal_inactive_file 100\n"}  # fmt: skip
    write(tmp_path, {top + "a/" + name: text for name, text in files.items()})
    assert host_memory.available_bytes(tmp_path) == 2100


def test_memory_of_this_machine():
    try:
        with open("/proc/meminfo") as file:
            total = next(int(line.split()[1]) for line in file if line.startswith("MemTotal:")) << 10
    except OSError:
        assert host_memory.available_bytes() == 0
    else:
        assert 0 < host_memory.available_bytes() <= total
