"""stream_layers on models of Transformers, against the same models without checkpoints."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import late_interaction as li
from tests.support.groups import needs_gloo, on_ranks, succeeded

transformers = pytest.importorskip("transformers", minversion="5")

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 128,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
MODELS = {
    "Qwen2": {"num_key_value_heads": 2},
    "Llama": {"num_key_value_heads": 2},
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 8},  # whose feed-forward output is normalized
    "ModernBert": {"pad_token_id": 0, "global_attn_every_n_layers": 2, "local_attention": 8},
    # Which has no module of this name, and normalizes sums.
    "Bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}


def made(name="Qwen2", seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    given = SIZES | MODELS.get(name, {}) | options
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**given))
    return model.to(dtype).train()


def drawn(B=5, S=20, masked=False, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 50, (B, S), generator=generator)
    mask = torch.ones(B, S, dtype=torch.int64)
    if masked:
        mask[1::2, S - 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def gradients(model, inputs, seed=3):
    """Loss and gradients of all trained weights."""
    torch.manual_seed(seed)
    states = model(**inputs).last_hidden_state
    kept = inputs["attention_mask"].unsqueeze(-1).bool()
    D = torch.nn.functional.normalize(states.masked_fill(~kept, 0.0), dim=-1)
    loss = li.losses.contrastive(li.Tokens(D[:, :6]), li.Tokens(D, kept.squeeze(-1)), temperature=1.0)
    trained = [x for x in model.parameters() if x.requires_grad]
    return loss.detach(), torch.autograd.grad(loss, trained, allow_unused=True)


def check(model, inputs, tokens, tolerance=1e-6):  # norms compute in float32
    other = copy.deepcopy(model)
    assert li.stream_layers(other, tokens=tokens) == SIZES["num_hidden_layers"]
    ours, wanted = gradients(other, inputs), gradients(model, inputs)
    torch.testing.assert_close(ours[0], wanted[0], rtol=0, atol=tolerance)
    assert len(ours[1]) == len(wanted[1])
    for got, want in zip(ours[1], wanted[1], strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            bound = tolerance * max(1.0, float(want.abs().max()))
            torch.testing.assert_close(got, want, rtol=0, atol=bound)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens", [7, 45, 1000])
def test_gradients_are_those_of_the_model(name, tokens, masked):
    check(made(name), drawn(masked=masked), tokens)


def test_one_long_sequence():
    check(made(), drawn(1, 100), 16)


@pytest.mark.parametrize("batch", [2, 3])
def test_positions_in_three_parts(batch):
    """Those of Qwen2-VL: position embeddings have the batch as their second dim."""
    config = transformers.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLTextConfig(
        **SIZES, num_key_value_heads=2, rope_parameters=MROPE, rope_scaling=MROPE
    )
    torch.manual_seed(0)
    model = transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VLTextModel(config).double().train()
    inputs = drawn(batch, 12)
    places = torch.arange(12).expand(3, batch, 12) + torch.arange(batch).view(1, -1, 1)
    check(model, {**inputs, "position_ids": places}, 15)


def test_layers_that_only_add_are_told_from_others():
    for name, only in (("Qwen2", True), ("ModernBert", True), ("Gemma2", False), ("Bert", False)):
        model = made(name)
        li.stream_layers(model, tokens=45)
        gradients(model, drawn())
        layer = next(x for x in model.modules() if getattr(x, "gradient_checkpointing", False))
        assert set(layer._gradient_checkpointing_func.only_adds.values()) == {only}


def test_frozen_weights_and_inputs_without_a_gradient():
    model = made()
    for name, x in model.named_parameters():
        x.requires_grad_("layers.1.mlp" in name)
    check(model, drawn(), 30)


def adapted(dropout, seed=0):
    peft = pytest.importorskip("peft")
    options = {"r": 4, "lora_alpha": 8, "lora_dropout": dropout, "target_modules": "all-linear"}
    torch.manual_seed(seed)
    model = peft.get_peft_model(made(), peft.LoraConfig(**options, init_lora_weights=False))
    return model.double().train()


@pytest.mark.parametrize("tokens", [10, 45])
def test_adapters(tokens):
    check(adapted(0.0), drawn(masked=True), tokens)


def test_dropout_draws_the_same_numbers_in_both_passes():
    """The gradient is that of the loss with one draw: along a direction, against differences."""
    model, inputs = adapted(0.3), drawn()
    li.stream_layers(model, tokens=16)
    _, grads = gradients(model, inputs)
    trained = [x for x in model.parameters() if x.requires_grad]
    direction = [torch.randn_like(x) for x in trained]
    slope = sum((g * v).sum() for g, v in zip(grads, direction, strict=True))
    losses = []
    for step in (1e-4, -2e-4):  # too short for the maxima to change
        with torch.no_grad():
            for x, v in zip(trained, direction, strict=True):
                x.add_(v, alpha=step)
        losses.append(gradients(model, inputs)[0])
    torch.testing.assert_close((losses[0] - losses[1]) / 2e-4, slope, rtol=0.01, atol=1e-3)


def test_autocast():
    model, inputs = made(dtype=torch.float32), drawn()
    exact = gradients(copy.deepcopy(model).double(), inputs)
    li.stream_layers(model, tokens=30)

    class Half(torch.nn.Module):
        def forward(self, **given):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(**given)
            out.last_hidden_state = out.last_hidden_state.float()
            return out

    half = Half()
    half.model = model
    ours = gradients(half, inputs)
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=0.02, atol=0.02)
    for got, want in zip(ours[1], exact[1], strict=True):
        if want is not None:
            torch.testing.assert_close(got.double(), want, rtol=0, atol=0.05 * float(want.abs().max()))


def test_the_input_of_each_layer_is_what_stays():
    model, kept = made(), {}
    li.stream_layers(model, tokens=30)
    gradients(model, drawn(4, 30))
    weights = {x.untyped_storage().data_ptr() for x in model.parameters()}

    def keep(x):
        place = x.untyped_storage().data_ptr()
        if place not in weights and x.dtype is torch.float64:
            kept[place] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        states, places = torch.randn(4, 30, 32, dtype=torch.float64), torch.arange(30)[None]
        for layer in model.layers:
            states = layer(states, position_embeddings=model.rotary_emb(torch.zeros(1, 1).double(), places))
    assert states.requires_grad and sum(kept.values()) == 2 * 4 * 30 * 32 * 8


def peak_bytes(step):
    """The most that is allocated at a time within a step, on a CPU."""
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [x for x in seen.profiler.kineto_results.events() if x.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda x: x.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def test_a_token_needs_its_checkpoints_and_two_gradients():
    """What a step takes for each more token of a batch; checkpoints alone take several times that."""
    found = {}
    for streams in (True, False):
        model = made(dtype=torch.float32, intermediate_size=512)
        if streams:
            li.stream_layers(model, tokens=32)
        else:
            model.gradient_checkpointing_enable({"use_reentrant": False})

        def step(batch, model=model):
            x = torch.randn(batch, 32, 32, requires_grad=True)
            model(inputs_embeds=x).last_hidden_state.mean().backward()

        peaks = [peak_bytes(lambda batch=batch: step(batch)) for batch in (64, 128)]
        found[streams] = (peaks[1] - peaks[0]) / (64 * 32)
    hidden, layers = 32 * 4, SIZES["num_hidden_layers"]
    assert found[True] <= 1.2 * (layers + 2) * hidden and found[False] > 4 * found[True]


def test_it_can_be_ended_and_needs_training():
    model, inputs = made(), drawn()
    before = gradients(model, inputs)
    li.stream_layers(model)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).last_hidden_state, made()(**inputs).last_hidden_state)
    model.gradient_checkpointing_disable()
    assert torch.equal(gradients(model, inputs)[0], before[0])


def test_gradients_of_norms_are_rounded_once():
    """In bfloat16 a batch with many chunks has those of the model without chunks, to a rounding."""
    model, inputs, found = made(dtype=torch.bfloat16), drawn(B=128), []
    for tokens in (None, 16):
        if tokens:
            li.stream_layers(model, tokens=tokens)
        names = (name for name, _ in model.named_parameters())
        found.append(dict(zip(names, gradients(model, inputs)[1], strict=True))["norm.weight"].double())
    assert (found[0] - found[1]).norm() < 2**-8 * found[0].norm()


def test_a_norm_takes_what_its_own_forward_takes():
    model = made()
    own = type(model.norm).forward
    type(model.norm).forward = lambda self, hidden_states, scale=1.0: own(self, hidden_states) * scale
    try:
        li.stream_layers(model)
        x = torch.randn(2, 3, 32, dtype=torch.float64)
        assert torch.equal(model.norm(hidden_states=x, scale=2.0), 2 * model.norm(x))
    finally:
        type(model.norm).forward = own


def test_a_copy_has_norms_of_its_own():
    model, inputs = made(), drawn()
    li.stream_layers(model)
    before = gradients(model, inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.nn.init.normal_(other.norm.weight)
        assert not torch.equal(gradients(other, inputs)[0], before[0])
    assert torch.equal(gradients(model, inputs)[0], before[0])


def by_ranks(rank, world):
    """Gradients of a data-parallel model, whose ranks have half of the batch each."""
    model = made()
    li.stream_layers(model, tokens=30)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    inputs = {name: x[rank::world] for name, x in drawn(4).items()}
    states = ddp(**inputs).last_hidden_state
    (states**2).mean().backward()
    dist.barrier()
    return [x.grad.numpy() for x in model.parameters() if x.grad is not None]


@needs_gloo
def test_data_parallel():
    ranks = succeeded(on_ranks(2, f"{__name__}.by_ranks"))
    model = made()
    (model(**drawn(4)).last_hidden_state ** 2).mean().backward()
    wanted = [x.grad for x in model.parameters() if x.grad is not None]
    for found in ranks:
        assert len(found) == len(wanted)
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(torch.from_numpy(got), want)


@pytest.mark.parametrize(("arguments", "error", "message"), [
    (("model", 5), TypeError, "model must be a torch.nn.Module, got 'model'"),
    ((torch.nn.Linear(2, 2), 5), ValueError, "model must have layers that support gradient checkpointing"),
    ((torch.nn.Linear(2, 2), 0), ValueError, "tokens must be above 0, got 0"),
    ((torch.nn.Linear(2, 2), 2.0), TypeError, "tokens must be an int, got 2.0"),
], ids=str)  # fmt: skip
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        li.stream_layers(arguments[0], tokens=arguments[1])


def test_layers_that_return_more_are_refused():
    class Twice(transformers.modeling_layers.GradientCheckpointingLayer):
        def forward(self, x):
            return x, x

    model = torch.nn.Sequential(Twice()).train()
    li.stream_layers(model)
    with pytest.raises(TypeError, match="layers that return hidden states alone, and Twice returns"):
        model(torch.randn(2, 3, 4, requires_grad=True))


def check_gradients(model, loss, tokens):
    """Compare the gradients of a model's ``loss`` with and without chunks."""
    other = copy.deepcopy(model)
    li.stream_layers(other, tokens=tokens)
    for each in (model, other):
        loss(each).backward()
    for x, y in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(y.grad, x.grad, rtol=1e-6, atol=1e-9)


IMAGES = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
IMAGES |= {"image_size": 16, "patch_size": 4}
BART = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (
    ("layers", 2), ("attention_heads", 4), ("ffn_dim", 48),
)}  # fmt: skip
OTHERS = {  # a configuration of each model, and what it makes of images or texts
    # The encoder of ColPali's images hands its layers an attention mask by position.
    "SiglipVision": (IMAGES | {"intermediate_size": 48}, "pooler_output"),
    # Multiplies the feed-forward network's output by a weight, which begins as 1.
    "Dinov2": (IMAGES, "last_hidden_state"),
    # A decoder's layers take the encoder's states, which have gradients.
    "Bart": (BART | {"vocab_size": 50, "d_model": 32, "dropout": 0.0}, "last_hidden_state"),
}


@pytest.mark.parametrize("tokens", [20, 10000])
@pytest.mark.parametrize("name", OTHERS)
def test_layers_that_are_called_in_other_ways(name, tokens):
    options, output = OTHERS[name]
    config = getattr(transformers, f"{name}Config")(**options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(config).double().train()
    images = {"pixel_values": torch.randn(3, 3, 16, 16, dtype=torch.float64)}
    given = drawn(4, 12) if name == "Bart" else images
    check_gradients(model, lambda each: getattr(each(**given), output).sin().sum(), tokens)


def test_a_model_that_keeps_a_cache_unless_it_checkpoints():
    """GPT2's takes a flag of its own for that, and a layer that runs twice would write to the cache twice."""
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    torch.manual_seed(0)
    model, inputs = transformers.GPT2Model(config).double().train(), drawn(3, 12)
    check_gradients(model, lambda each: each(**inputs).last_hidden_state.sin().sum(), 16)
    li.stream_layers(model)
    assert model(**inputs).past_key_values is None
    assert model._gradient_checkpointing_func(abs, -2) == 2  # a module may call it with what is no layer
    model.gradient_checkpointing_disable()
    assert model(**inputs).past_key_values is not None


def test_a_feed_forward_network_with_more_inputs():
    class Layer(transformers.modeling_layers.GradientCheckpointingLayer):
        def __init__(self, by_name):
            super().__init__()
            self.mlp, self.by_name = torch.nn.Bilinear(4, 4, 4), by_name

        def forward(self, x):
            return x + (self.mlp(input1=x, input2=x) if self.by_name else self.mlp(x, x))

    x = torch.randn(3, 5, 4, dtype=torch.float64)
    model = torch.nn.Sequential(Layer(False), Layer(True)).double().train()
    check_gradients(model, lambda each: each(x).sin().sum(), 5)


def test_hidden_states_that_come_by_name():
    """So do those of the images of Llama 4 and Mllama."""

    class Layer(transformers.modeling_layers.GradientCheckpointingLayer):
        def __init__(self):
            super().__init__()
            self.mlp = torch.nn.Linear(4, 4)

        def forward(self, states, attention_mask=None):
            return states + self.mlp(states * attention_mask)

    x, model = torch.randn(3, 5, 4, dtype=torch.float64), Layer().double().train()
    mask = torch.arange(5.0).view(1, 5, 1).double()
    check_gradients(model, lambda each: each(states=x, attention_mask=mask).sin().sum(), 5)


@pytest.mark.parametrize("tokens", [16, 10000])
def test_hooks_of_weights_run_once(tokens):
    inputs, seen = drawn(3, 12), []

    def loss(model):
        for x in model.parameters():
            x.register_hook(lambda grad: seen.append(0) or 3 * grad)
        return model(**inputs).last_hidden_state.sin().sum()

    model = made()
    check_gradients(model, loss, tokens)
    assert len(seen) == 2 * sum(1 for _ in model.parameters())
