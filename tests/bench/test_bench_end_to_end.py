"""`python -m bench end-to-end` on the CPU: tiny models of the true classes, and what becomes of a variant
without memory or time."""

import dataclasses
import importlib.util
import time

import pytest
import torch

from bench.command_line import main
from bench.harness import results
from bench.harness.shape import BatchShape
from bench.peers.encoders import RECIPES
from bench.rules import broken_rules
from bench.suites import end_to_end as recipe_run
from bench.suites.end_to_end import ALONE, CACHED, EXACT, MAXSIM, STEP, VANILLA
from bench.suites.training_steps import ENCODER, LOSS, OUT_OF_MEMORY, Marks, Step

pytest.importorskip("transformers")
CPU = torch.device("cpu")
TEXT = RECIPES["modernbert"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Few queries are compared; and one thread is faster where other tests run beside these."""
    monkeypatch.setattr(recipe_run, "CHECKED", 6)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(name, lora=False):
    torch.manual_seed(0)
    return RECIPES[name].build(CPU, True, lora)


def losses(name, encoder, batch):
    shape = BatchShape("tiny", batch, batch, encoder.query, encoder.document, 128)
    return {who: m.make(shape) for who, m in recipe_run.methods_of(RECIPES[name], shape, CPU).items()}


def gradients(step, loss, batch):
    torch.manual_seed(step.seed)
    value = step.gradients(loss, batch, Marks(CPU))
    found = [x.grad.clone() for x in step.encoder.trained() if x.grad is not None]
    step.optimizer.zero_grad()
    return value, found


# ---- models and steps ----


@pytest.mark.parametrize("name", RECIPES)
def test_unit_embeddings_of_the_stated_sizes_that_train_every_weight(name):
    encoder = build(name)
    queries, documents = encoder.embed(3, seed=1)
    assert queries.shape == (3, encoder.query, 128) and documents.shape == (3, encoder.document, 128)
    for x in (queries, documents):
        torch.testing.assert_close(x.norm(dim=-1), torch.ones(x.shape[:-1]))
    (queries.square().sum() + documents.sum()).backward()
    assert all(x.grad is not None for x in encoder.trained())
    trained = [name for name, x in encoder.module.named_parameters() if x.requires_grad]
    assert not any("visual" in name or "vision" in name for name in trained)
    again = encoder.embed(3, seed=1)
    torch.testing.assert_close(again[1], documents, rtol=0, atol=0)
    assert not torch.equal(encoder.embed(3, seed=2)[1], documents)


@pytest.mark.parametrize("name", ["colqwen2", "modernvbert"])
def test_lora_trains_the_language_model_and_the_projection_alone(name):
    pytest.importorskip("peft")
    encoder = build(name, lora=True)
    trained = [n for n, x in encoder.module.named_parameters() if x.requires_grad]
    assert all("lora_" in n for n in trained)
    assert any("embedding_proj_layer" in n for n in trained)
    assert any("language_model" in n or "text_model" in n for n in trained)
    assert not any("visual" in n or "vision" in n for n in trained)
    step = Step(encoder)
    every = {who: gradients(step, loss, 4) for who, loss in losses(name, encoder, 4).items()}
    for who in (MAXSIM, EXACT):
        torch.testing.assert_close(every[who], every[VANILLA], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["colqwen2", "modernvbert"])
def test_true_sizes(name):
    """Without memory for them: parameters as published, and the tokens that inputs and pixels give."""
    encoder = RECIPES[name].build(torch.device("meta"), False, False)
    millions = sum(x.numel() for x in encoder.module.parameters()) / 1e6
    assert millions == pytest.approx({"colqwen2": 2209, "modernvbert": 252}[name], rel=0.01)
    assert (encoder.query, encoder.document) == {"colqwen2": (24, 747), "modernvbert": (24, 876)}[name]
    inputs = encoder.draw_documents(1, torch.Generator().manual_seed(0))
    config = encoder.module.model.config.vlm_config
    image = int((inputs["input_ids"] == config.image_token_id).sum())
    if name == "colqwen2":
        assert image == inputs["image_grid_thw"].prod() // 4 == 736
        assert inputs["pixel_values"].shape == (1, 2944, 1176)
    else:
        assert image == 13 * 64 == 832 and inputs["pixel_values"].shape == (1, 13, 3, 512, 512)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("part", [None, 2, 4])
def test_every_loss_gives_the_same_step(name, part):
    encoder = build(name)
    step = Step(encoder, part)
    every = {who: gradients(step, loss, 4) for who, loss in losses(name, encoder, 4).items()}
    assert len(every) >= 3
    for who, found in every.items():
        assert len(found[1]) == len(encoder.trained()), who
        torch.testing.assert_close(found, every[VANILLA], rtol=1e-3, atol=1e-5)
    if part == 4:  # all in one part
        whole = gradients(Step(encoder), losses(name, encoder, 4)[EXACT], 4)
        torch.testing.assert_close(every[EXACT], whole, rtol=1e-3, atol=1e-5)


def test_a_step_leaves_the_weights_and_times_the_loss():
    encoder = build("modernbert")
    before = [x.detach().clone() for x in encoder.trained()]

    def slow(x):
        time.sleep(0.05)
        return (x.Q.sum() * x.D.sum()).float()

    step = Step(encoder)
    for part in (None, 2):
        marks = Marks(CPU)
        start = time.perf_counter()
        step.part = part
        step.run(slow, 4, marks)
        assert 0.05 <= marks.loss_seconds() < time.perf_counter() - start
        assert marks.where == ENCODER
    assert step.optimizer.state[encoder.trained()[0]]["step"] == 2
    torch.testing.assert_close(encoder.trained(), before, rtol=0, atol=0)


# ---- a run ----


def no_memory(*_):
    raise torch.OutOfMemoryError("no")


class Run:
    """A run of the text recipe's tiny model, with what it kept."""

    def __init__(self):
        self.kept = []
        until = time.monotonic() + 1e6
        self.run = recipe_run.RecipeRun(
            TEXT, build("modernbert"), self.kept.append, 2, until, part=3, enough_s=0.0
        )

    def measure(self, *batches):
        rows = self.run.measure(batches)
        assert rows == self.kept
        return {(row["mode"], row["batch"]): row["variants"] for row in rows}


def fail_from(monkeypatch, who, batch, loss=no_memory, checked=False):
    """One variant has another loss from a batch on: one without memory. checked: also where it is checked."""
    real = recipe_run.methods_of

    def methods(recipe, shape, device):
        found = real(recipe, shape, device)
        if shape.Nq >= batch and (checked or shape.Nq != recipe_run.CHECKED):
            found[who] = dataclasses.replace(found[who], make=lambda _: loss)
        return found

    monkeypatch.setattr(recipe_run, "methods_of", methods)


def test_the_loss_runs_out_of_memory_and_one_batch_more_is_measured(monkeypatch):
    fail_from(monkeypatch, VANILLA, 4)
    found = Run().measure(2, 4, 8, 16)
    assert found[STEP, 2][VANILLA]["s"] > 0 and found[STEP, 2][VANILLA]["calls"] == 2
    failed = found[ALONE, 4][VANILLA]
    assert (failed["error"], failed["where"]) == (OUT_OF_MEMORY, LOSS) and "s" not in failed
    assert found[STEP, 4][VANILLA]["where"] == LOSS
    assert VANILLA not in found[STEP, 8] and found[STEP, 8][EXACT]["s"] > 0
    assert 0 < found[STEP, 8][EXACT]["loss_s"] < found[STEP, 8][EXACT]["s"]
    assert max(batch for _, batch in found) == 8  # one beyond, and no GradCache: the encoder had memory
    assert not any(mode == CACHED for mode, _ in found)


def test_gradcache_begins_where_the_encoder_has_no_memory(monkeypatch):
    at = Run()
    embed = at.run.encoder.embed
    small = lambda count, seed: embed(count, seed) if count <= 3 else no_memory()  # noqa: E731
    monkeypatch.setattr(at.run.encoder, "embed", small)
    found = at.measure(2, 4, 8)
    assert CACHED not in {mode for mode, batch in found if batch == 2}
    assert {values["where"] for values in found[STEP, 4].values()} == {ENCODER}
    assert found[CACHED, 4][EXACT]["s"] > 0 and found[CACHED, 8][VANILLA]["s"] > 0
    assert (STEP, 8) not in found
    assert {row["part"] for row in at.kept if row["mode"] == CACHED} == {3}


def test_what_would_end_too_late_is_not_begun():
    at = Run()
    at.run.pace[STEP] = 2, 1e6
    found = at.measure(2, 4)
    assert {values["error"] for values in found[STEP, 2].values()} == {recipe_run.LEFT_OUT}
    assert (STEP, 4) not in found and (CACHED, 4) not in found and found[ALONE, 4][EXACT]["s"] > 0


def test_a_loss_that_is_wrong_is_not_timed(monkeypatch):
    fail_from(monkeypatch, MAXSIM, 1, lambda x: 2 * (x.Q.sum() + x.D.sum()), checked=True)
    found = Run().measure(2)
    for mode in (ALONE, STEP):
        assert found[mode, 2][MAXSIM]["error"].startswith("wrong: off by")
        assert found[mode, 2][EXACT]["s"] > 0 and found[mode, 2][EXACT]["grad_err"] < 3e-3


def test_a_dry_run_from_the_command_line(tmp_path, capsys):
    out = tmp_path / "end-to-end-a-gpu.json"
    words = ["end-to-end", "--dry-run", "--device", "cpu", "--only", "modernbert"]
    assert main([*words, "--out", str(out)]) == 0
    headers, rows = results.split(results.read(out))
    assert [(row["mode"], row["batch"]) for row in rows] == [(m, b) for b in (4, 8) for m in recipe_run.MODES]
    assert all(values["s"] > 0 for row in rows for values in row["variants"].values())
    assert "modernbert, GradCache step | 8 | vanilla" in capsys.readouterr().out
    assert headers[0]["command"] == " ".join(["python", "-m", "bench", *words])
    assert broken_rules(results.read(out)) == []
    assert main(["end-to-end", "--device", "cpu"]) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_a_run_on_a_gpu(name):
    """Autocast, marks by events and peaks of memory, with tiny models."""
    torch.manual_seed(0)
    encoder = RECIPES[name].build(torch.device("cuda"), True, bool(importlib.util.find_spec("peft")))
    assert {x.dtype for x in encoder.embed(2, seed=0)} == {torch.bfloat16}
    options = {"enough_s": 0.0, "part": 3, "dry_run": True}
    until = time.monotonic() + 1e6
    run = recipe_run.RecipeRun(RECIPES[name], encoder, lambda row: None, 2, until, **options)
    for row in run.measure([4, 8]):
        for who in (VANILLA, MAXSIM, EXACT):
            values = row["variants"][who]
            assert 0 < values["loss_s"] < values["s"] and values["peak_mib"] > 0
            assert values["loss"] == pytest.approx(row["variants"][VANILLA]["loss"], rel=0.1)
