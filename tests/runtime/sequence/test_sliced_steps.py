"""Blocks that run on slices of the sequence give the plain module's losses and gradients."""

import gc
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_pipeoffload.runtime.sequence import EarlierSlices
from lightning_pipeoffload.runtime.step import StageRunner
from lightning_pipeoffload.schedule import Action, Costs, Kind, Schedule, build, offload_activations
from tests.support.comparison import train_plain
from tests.support.families import (
    FAMILIES,
    HF,
    PLAIN,
    TEXT,
    Family,
    call_step,
    next_token_padded,
)
from tests.support.in_process import InProcessPipeline
from tests.support.offloaded import memory_of_all
from tests.support.pairs import slow
from tests.support.small_modules import (
    DemoGPT,
    Outcome,
    assert_same,
    run_pipeline,
    run_plain,
)

VOCABULARY, LENGTH = 16, 12


def tokens(count):
    return torch.randint(1, VOCABULARY, (count, LENGTH))


def sliced(name, num_ranks, count, num_slices):
    return build(name, num_ranks, count, num_sequence_slices=num_slices)


@cache
def plain(**options):
    torch.manual_seed(0)
    module = DemoGPT(context=LENGTH, **options).double()
    batch = tokens(8)
    return module, batch, run_plain(module, batch, 2)


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_slices", "options"),
    [
        ("seq_1f1b", 2, 4, {}),
        ("seq_zb", 2, 3, {"recompute": "full"}),
        ("seq_zb", 4, 4, {}),
        slow(("seq_zb", 3, 2, {"recompute": "cheap"})),
        slow(("seq_1f1b", 1, 5, {"recompute": "full"})),
        slow(("seq_zb", 3, 4, {"split": [4, 4, 0]})),
    ],
)
def test_gradients_are_the_plain_modules(name, num_ranks, num_slices, options):
    module, batch, expected = plain(tie_weights=True)
    found = run_pipeline(module, sliced(name, num_ranks, 4, num_slices), batch, 2, **options)
    assert_same(found, expected)


def test_slices_of_several_stages_of_a_rank_are_exact():
    units, stages = range(6), [(0, 3), (1, 2)]  # a V, all forwards first
    ranks = [
        [Action(Kind.F, stage, unit) for stage in of_rank for unit in units]
        + [Action(Kind.BW, s, m * 3 + k) for s in of_rank[::-1] for m in (0, 1) for k in (2, 1, 0)]
        for of_rank in stages
    ]
    module, batch, _ = plain()
    found = run_pipeline(module, Schedule.of(ranks, num_sequence_slices=3), batch, 4)
    assert_same(found, run_plain(module, batch, 4))


@pytest.mark.slow
def test_sequences_of_other_lengths_are_cut_as_those_that_were_traced():
    torch.manual_seed(0)
    module = DemoGPT(context=32).double()
    pipeline = assert_lengths_are_exact(module, (8, 12, 16, 20, 24, 32, 22, 28))
    assert any(part.record.is_derived for part in pipeline.executors[0].microbatches)


def assert_lengths_are_exact(module, lengths):
    pipeline = InProcessPipeline(module, sliced("seq_zb", 2, 2, 3), sum_step)
    losses, expected, gradients = [], [], []
    for length in lengths:
        batch = torch.randint(VOCABULARY, (4, length))
        losses += pipeline.run(batch, 2)
        plainly = run_plain(module, batch, 2)
        expected += plainly.losses
        gradients.append(plainly.gradients)
    summed = {name: sum(each[name] for each in gradients) for name in gradients[0]}
    assert_same(Outcome(losses, pipeline.named_gradients()), Outcome(expected, summed))
    return pipeline


class Window(nn.Module):
    """A causal mask of a window, where sequences are longer than it, as in Mistral."""

    def __init__(self, size):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(map(Attention, range(4)))
        self.size = size

    def step(self, x):
        x, mask = self.embed(x), None
        if x.shape[1] > self.size:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(-self.size)
        for block in self.blocks:
            x = block(x, mask)
        return x.pow(2).mean()


class Attention(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, mask):
        y = self.linear(x)[:, None]
        is_causal = mask is None
        return x + functional.scaled_dot_product_attention(y, y, y, mask, is_causal=is_causal)[:, 0]


def test_short_sequences_run_in_as_many_slices_as_they_have_room_for():
    torch.manual_seed(0)
    assert_lengths_are_exact(Window(10).double(), (16, 5, 1, 12, 3, 2))


@pytest.mark.slow
def test_the_first_sequences_may_be_short():
    torch.manual_seed(0)
    assert_lengths_are_exact(Window(10).double(), (3, 16, 5))


@pytest.mark.parametrize("lengths", [(8, 16, 9), (16, 8, 24)])
def test_a_mask_of_long_sequences_only_is_cut(lengths):
    torch.manual_seed(0)
    assert_lengths_are_exact(Window(10).double(), lengths)


def test_what_is_offloaded_changes_no_bit():
    module, batch, _ = plain()
    schedule = sliced("seq_zb", 2, 4, 3)
    costs = Costs(1, 1, 1, weight_residue=0.5, offload=0.1, reload=0.1)
    plan, _ = offload_activations(schedule, costs, "full")
    assert plan.has_copies
    found = run_pipeline(module, plan, batch, 2, memory=memory_of_all)
    expected = run_pipeline(module, schedule, batch, 2)
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


def test_dropout_is_drawn_anew_for_each_slice_and_alike_for_every_plan():
    module, batch, _ = plain(dropout=0.2)
    expected = run_pipeline(module, sliced("seq_1f1b", 1, 4, 3), batch, 2)
    for name, num_ranks in (("seq_zb", 2), ("seq_1f1b", 4)):
        found = run_pipeline(module, sliced(name, num_ranks, 4, 3), batch, 2)
        assert all(map(torch.equal, found.losses, expected.losses))
        for of, gradient in expected.gradients.items():
            assert torch.equal(found.gradients[of], gradient), of


class Dropping(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(count))
        self.drop = nn.Dropout(0.5)
        self.count, self.masks = 0, []

    def step(self, x):
        self.count += 1
        self.masks.append(torch.rand(()))  # of the code before the blocks
        x = self.drop(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def test_the_code_before_the_blocks_counts_once_and_draws_alike_for_each_slice():
    torch.manual_seed(0)
    module, batch = Dropping(4).double(), tokens(4)
    outcomes = []
    for num_slices in (1, 3):
        pipeline = InProcessPipeline(module, sliced("seq_1f1b", 2, 2, num_slices), sum_step)
        losses = pipeline.run(batch, 2)
        outcomes.append(Outcome(losses, pipeline.named_gradients()))
        assert [rank.module.count for rank in pipeline.ranks] == [2, 2]
        assert [len(rank.module.masks) for rank in pipeline.ranks] == [2, 2]
    assert_same(outcomes[1], outcomes[0])


def sum_step(module, part):
    return module.step(part)


def test_a_wrong_gradient_of_earlier_keys_and_values_shows(monkeypatch):
    module, batch, expected = plain()
    pop = EarlierSlices.pop_edges_and_gradients

    def wrong(self, part):
        edges, gradients = pop(self, part)
        return edges, [gradient * 1.001 for gradient in gradients]

    monkeypatch.setattr(EarlierSlices, "pop_edges_and_gradients", wrong)
    with pytest.raises(AssertionError):
        assert_same(run_pipeline(module, sliced("seq_zb", 2, 4, 3), batch, 2), expected, 1e-5)


def test_blocks_that_run_again_keep_nothing_for_later_slices(monkeypatch):
    module, batch, _ = plain()
    lengths, backward = [], StageRunner.backward

    def look(self, microbatch, *args, **options):
        flight = self.in_flight[microbatch.index]
        gradients = backward(self, microbatch, *args, **options)
        kept = flight.earlier.keys_and_values.values()
        lengths.append((flight.slice.index, {*map(len, kept)}))
        return gradients

    monkeypatch.setattr(StageRunner, "backward", look)
    run_pipeline(module, sliced("seq_1f1b", 1, 1, 3), batch, 8, recompute="full")
    assert lengths == [(2, {2}), (1, {1}), (0, {0})]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_dropped_step_is_freed_without_pythons_collector(recompute, monkeypatch):
    module, batch, _ = plain()
    schedule = sliced("seq_1f1b", 1, 1, 3)
    pipeline = InProcessPipeline(module, schedule, sum_step, recompute=recompute)

    def fail(self, microbatch, *args, **options):
        raise ArithmeticError

    pipeline.run(batch, 8)
    gc.collect()
    before = num_in_graphs()
    gc.disable()
    try:
        pipeline.run(batch, 8)
        assert num_in_graphs() == before
        with monkeypatch.context() as patched:
            patched.setattr(StageRunner, "backward", fail)
            with pytest.raises(ArithmeticError):
                pipeline.run(batch, 8)
        pipeline.executors[0].abandon()
        assert num_in_graphs() == before
    finally:
        gc.enable()


def num_in_graphs():
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    return sum(tensor.grad_fn is not None for tensor in tensors)


# Models as people bring them


class CausalEncoder(nn.Module):
    """Torch's own layers, which call attention in C++, with a causal mask."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        layers = [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(8)]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x):
        x = self.embed(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]).to(x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def next_of(model, batch):
    return functional.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def padded_left(count):
    mask = (torch.arange(LENGTH) >= torch.arange(count)[:, None] % 4).long()
    return {"input_ids": tokens(count), "attention_mask": mask}


ONE_HEAD = {**TEXT, "num_key_value_heads": 1}
OWN = {
    "causal_encoder": Family(CausalEncoder, next_of, tokens),
    "mistral": Family(HF("MistralForCausalLM", **ONE_HEAD, sliding_window=4), PLAIN, tokens),
    "llama_padded_left": Family(HF("LlamaForCausalLM", **ONE_HEAD), next_token_padded, padded_left),
    "llama_tied": Family(
        HF("LlamaForCausalLM", **ONE_HEAD, tie_word_embeddings=True), PLAIN, tokens
    ),
    "qwen2": Family(HF("Qwen2ForCausalLM", **ONE_HEAD), PLAIN, tokens),
    "phi3": Family(HF("Phi3ForCausalLM", **ONE_HEAD), PLAIN, tokens),
    "neox": Family(HF("GPTNeoXForCausalLM", **TEXT, max_position_embeddings=16), PLAIN, tokens),
    "olmo2": Family(HF("Olmo2ForCausalLM", **ONE_HEAD), PLAIN, tokens),
    "granite": Family(HF("GraniteForCausalLM", **ONE_HEAD), PLAIN, tokens),
    "smollm3": Family(HF("SmolLM3ForCausalLM", **ONE_HEAD), PLAIN, tokens),
    "opt": Family(
        HF("OPTForCausalLM", **TEXT, ffn_dim=16, word_embed_proj_dim=8, dropout=0.0), PLAIN, tokens
    ),
    "olmoe": Family(
        HF("OlmoeForCausalLM", **ONE_HEAD, num_experts=2, num_experts_per_tok=1),
        PLAIN,
        tokens,
        dtype=torch.float32,
    ),
    "deepseek_v3": Family(
        HF(
            "DeepseekV3ForCausalLM",
            **{**TEXT, "moe_intermediate_size": 8, "n_routed_experts": 4, "n_group": 1},
            **{"topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 4},
            **{"q_lora_rank": 4, "kv_lora_rank": 4, "qk_rope_head_dim": 4, "v_head_dim": 4},
            **{"qk_nope_head_dim": 4, "n_shared_experts": 1},
        ),
        PLAIN,
        tokens,
        dtype=torch.float32,
    ),
}


def train_family(family, num_slices=3, num_ranks=2, name="seq_zb", **options):
    torch.manual_seed(0)
    module, batch = family.task(), family.samples(4)
    if family.blocks:
        options["blocks"] = family.blocks
    plan = sliced(name, num_ranks, 2, num_slices)
    pipeline = InProcessPipeline(module, plan, call_step, **options)
    found = Outcome(pipeline.run(batch, 2), pipeline.named_gradients(), pipeline.named_buffers())
    assert_same(found, train_plain(module, batch, 2), family.tolerance)


SLOW = [*OWN][1:]


@pytest.mark.parametrize("name", ["llama_padding_mask", slow("llama_cache"), slow("gpt2")])
def test_families_of_the_other_tests_are_exact(name):
    train_family(FAMILIES[name])


@pytest.mark.parametrize("name", [slow(n) if n in SLOW else n for n in OWN])
def test_more_families_are_exact(name):
    train_family(OWN[name])


# What is refused


REFUSED = {
    "bert": "attends to later tokens",
    "mamba": "something else on slices",
    "scaled_gpt": "attends to later tokens",
    "dense_convolutions": "BatchNorm",
    "mixtral_router_loss": "hands its sequences from block to block only",
    "llama_hidden_states": "hands its sequences from block to block only",
    "llama_checkpointed": 'use recompute="full"',
    "vit": "on half of it",
    "t5": "num_sequence_slices=1",
}
BY_DEFAULT = {"bert", "llama_hidden_states", "llama_checkpointed"}


@pytest.mark.parametrize("name", [n if n in BY_DEFAULT else slow(n) for n in REFUSED])
def test_families_are_refused_by_name(name):
    with pytest.raises(ValueError, match=REFUSED[name]):
        train_family(FAMILIES[name])


class Between(nn.Module):
    """A step with a function of its own between blocks, or around their calls."""

    def __init__(self, call):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(4))
        self.call = call

    def step(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = self.call(block, x)
        return x.pow(2).mean()


class Eager(nn.Module):
    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (x @ x.mT).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ x


def pooled(block, x):
    return block(x).mean(1)[:, None].expand_as(x)


def count(block, x):
    block.calls = getattr(block, "calls", 0) + 1
    return block(x)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda block, x: block(x) + x.mean(1, keepdim=True), "from block to block only"),
        (lambda block, x: block(x).relu(), "from outputs of blocks"),
        (lambda block, x: block(block(x)), "the step calls blocks several times"),
        (partial(checkpoint, use_reentrant=False), "checkpoints blocks.0"),
        (lambda block, x: block(x[:, ::2]).repeat_interleave(2, 1), "num_sequence_slices=1"),
    ],
)
def test_work_between_blocks_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        run_pipeline(Between(call).double(), sliced("seq_1f1b", 2, 2, 3), tokens(4), 2)


class Gated(Eager):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.gate * super().forward(x)


@pytest.mark.parametrize("attention", [Eager, Gated])
def test_eager_attention_is_refused(attention):
    module = Between(lambda block, x: block(x))
    module.blocks[1].append(attention())
    with pytest.raises(ValueError, match=r"blocks.1 computes something else on slices"):
        run_pipeline(module.double(), sliced("seq_1f1b", 2, 2, 3), tokens(4), 2)


class Mixed(nn.Module):
    """A token shift after a weight that begins at one."""

    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.own * x + (1 - self.own) * functional.pad(x, (0, 0, 1, -1))


class Scheduled(nn.Module):
    """A sum along the sequence after a number that a hook would raise from zero."""

    def __init__(self, share=0.0):
        super().__init__()
        if share is None:
            self.register_buffer("share", torch.zeros(()))
        else:
            self.share = share

    def forward(self, x):
        return x + self.share * x.cumsum(1)


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(1, keepdim=True) if self.training else x


class Capacity(nn.Module):
    """Experts of which each takes half of all tokens, the first ones; alike tokens want one."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)

    def forward(self, x):
        wants = functional.one_hot(self.router(x).argmax(-1), 4).flatten(0, 1)
        place = (wants.cumsum(0) * wants).amax(-1)
        return x * (place <= len(place) / 2).view(*x.shape[:2], 1)


class WithLoss(torch.autograd.Function):
    """Adds the gradient of a loss that nobody sees, as DeepSeek's AddAuxiliaryLoss."""

    @staticmethod
    def forward(ctx, x, loss):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones(())


class RouterLoss(nn.Module):
    def forward(self, x):
        return WithLoss.apply(x, 1e-6 * x.softmax(-1).mean(1).square().sum())


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (Mixed, "something else on slices"),
        (lambda: Scheduled(None), "something else on slices"),
        (Centred, "something else on slices"),
        (Capacity, "something else on slices"),
        (RouterLoss, "something else on slices"),
        (Counts, "blocks.1 writes its buffer 1.count"),
    ],
)
def test_what_little_shows_of_is_refused(part, words):
    torch.manual_seed(0)
    module = Between(lambda block, x: block(x))
    module.blocks[1].append(part())
    with pytest.raises(ValueError, match=words):
        run_pipeline(module.double(), sliced("seq_1f1b", 2, 2, 3), tokens(4), 2)


def test_hooks_on_gradients_are_refused_where_they_would_get_those_of_slices():
    pipeline = InProcessPipeline(Window(10), sliced("seq_zb", 2, 2, 3), sum_step)
    for rank in pipeline.ranks:
        rank.module.embed.weight.register_hook(torch.sign)
    with pytest.raises(ValueError, match=r"hook on embed.weight would get the gradient of each"):
        pipeline.run(tokens(4), 2)


class Prefix(nn.Module):
    """In the last block tokens of a text attend to its prefix, whose length is in the batch."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(map(Attention, range(4)))

    def step(self, batch):
        x = self.embed(batch["tokens"])
        place = torch.arange(x.shape[1])
        for block in self.blocks:
            prefix = batch["prefix"][:, None, None] * (block is self.blocks[-1])
            x = block(x, ((place <= place[:, None]) | (place < prefix))[:, None])
        return x.pow(2).mean()


@pytest.mark.parametrize("num_causal", [0, 2])
def test_a_mask_that_lets_tokens_see_later_slices_is_refused_in_each_batch(num_causal):
    pipeline = InProcessPipeline(Prefix(), sliced("seq_zb", 2, 2, 3), sum_step)
    for _ in range(num_causal):
        pipeline.run({"tokens": tokens(4), "prefix": torch.tensor([1, 1, 1, 1])}, 2)
    open_mask = {"tokens": tokens(4), "prefix": torch.tensor([1, 1, 1, 9])}
    with pytest.raises(ValueError, match=r"mask that blocks.\d gets .* attend to later ones"):
        pipeline.run(open_mask, 2)


class Dropped(nn.Module):
    def forward(self, x):
        if torch.rand(()) < 0.4:
            return x
        y = x[:, None]
        return x + functional.scaled_dot_product_attention(y, y, y, is_causal=True)[:, 0]


def test_a_block_that_is_dropped_on_some_slices_is_refused():
    module = Between(lambda block, x: block(x))
    for block in module.blocks:
        block.append(Dropped())
    with pytest.raises(ValueError, match=r"attention on some slices of a sequence only"):
        run_pipeline(module.double(), sliced("seq_1f1b", 2, 2, 3), tokens(4), 2)


def test_a_block_whose_attribute_has_changed_is_checked_again():
    module = Between(lambda block, x: block(x))
    for block in module.blocks:
        block.append(Scheduled())
    pipeline = InProcessPipeline(module, sliced("seq_zb", 2, 2, 3), sum_step)
    for _ in range(2):
        pipeline.run(tokens(4), 2)
    for rank in pipeline.ranks:
        for block in rank.module.blocks:
            block[1].share = 0.5
    with pytest.raises(ValueError, match="something else on slices"):
        pipeline.run(tokens(4), 2)


class Opened(nn.Module):
    """A sum along the sequence after an argument."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, share):
        return self.linear(x) + share * x.cumsum(1)


@pytest.mark.parametrize("opened", [0.5, torch.tensor(0.5)])
def test_a_block_is_checked_again_once_an_argument_has_changed(opened):
    module = Between(lambda block, x: block(x, shares[0]))
    module.blocks = nn.ModuleList(Opened() for _ in range(4))
    shares = [opened * 0]
    pipeline = InProcessPipeline(module.double(), sliced("seq_zb", 2, 2, 3), sum_step)
    for _ in range(4):
        pipeline.run(tokens(4), 2)
    shares[0] = opened
    message = (
        r"blocks.\d computes something else on slices.*in batch 5 of these shapes; in batch \d"
    )
    with pytest.raises(ValueError, match=message):
        pipeline.run(tokens(4), 2)


class LongSum(nn.Module):
    """Looks along sequences that are longer than 10."""

    def forward(self, x):
        far = torch.arange(x.shape[1]) > 10
        return x + (x * far[:, None]).cumsum(1)


def test_a_block_that_is_right_at_short_lengths_only_is_refused_at_the_first_long_one():
    module = Between(lambda block, x: block(x))
    for block in module.blocks:
        block.append(LongSum())
    module.double()
    with pytest.raises(ValueError, match=r"blocks.0 computes something else on slices"):
        assert_lengths_are_exact(module, (8, 10, 16))
