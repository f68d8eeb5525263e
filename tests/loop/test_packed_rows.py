"""Fits of packed rows: each text as if it were alone, on any number of ranks and replicas."""

import random
from itertools import islice
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
)

from lightning_pipeoffload import MinibatchSampler, PackedRows, PackedRowsSampler
from lightning_pipeoffload.loop import Split, packed_row_checks
from lightning_pipeoffload.loop.microbatches import MicrobatchWeights
from lightning_pipeoffload.loop.packed_row_checks import DenseMasks, PackedRowCheck
from lightning_pipeoffload.loop.step_calls import StepInputs
from lightning_pipeoffload.processes import forget_replica, set_replica
from tests.support import fits
from tests.support.pairs import slow

ROWS, TOKENS = 4, 24
DRAWS = random.Random(7)
TEXTS = [[DRAWS.randrange(1, 48) for _ in range(DRAWS.randint(3, 16))] for _ in range(60)]
ITEMS = [
    # some with a prompt that the loss leaves out
    {"input_ids": text, "labels": text if n % 3 else [-100, -100, *text[2:]]}
    for n, text in enumerate(TEXTS)
]
BY_TOKENS = {"microbatch_weight": "tokens"}


def attend_by_bounds(module, query, key, value, mask, cu_seq_lens_q, max_length_q, **options):
    """Attend within texts, as kernels for variable lengths do."""
    assert (mask, max_length_q) == (None, query.shape[2])
    places = torch.arange(query.shape[2])
    text = torch.searchsorted(cu_seq_lens_q, places, right=True)
    seen = (text[:, None] == text) & (places[:, None] >= places)
    attended = scaled_dot_product_attention(query, key, value, seen, scale=options["scaling"])
    return attended.transpose(1, 2), None


AttentionInterface.register("by_bounds", attend_by_bounds)
AttentionMaskInterface.register("by_bounds", lambda *args, **options: None)


class Texts(L.LightningModule):
    def __init__(self, use_cache=False, dropout=0.0, shifts_labels=False, by_bounds=False):
        super().__init__()
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=48,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            use_cache=use_cache,
            attention_dropout=dropout,
            attn_implementation="by_bounds" if by_bounds else "sdpa",
        )
        self.model = LlamaForCausalLM(config).double()
        self.shifts_labels, self.by_bounds = shifts_labels, by_bounds
        self.read = []

    def loss(self, batch, reduction="mean"):
        given = {**batch, "labels": None}
        if self.by_bounds:
            bounds, length = given.pop("cu_seqlens")[0], batch["input_ids"].shape[1]
            given |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            given |= {"max_length_q": length, "max_length_k": length}
        logits, labels = self.model(**given).logits, batch["labels"]
        if not self.shifts_labels:
            logits, labels = logits[:, :-1], labels[:, 1:]
        # Hugging Face's own loss is in float32
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.read.append(batch["input_ids"].tolist())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def sampler(num_rows=ROWS):
    return PackedRowsSampler([len(text) for text in TEXTS], num_rows, TOKENS, seed=5)


def loader(shifts_labels=False, num_rows=ROWS, by_bounds=False):
    collate = PackedRows(num_rows, TOKENS, shifts_labels, by_bounds)
    return DataLoader(ITEMS, batch_sampler=sampler(num_rows), collate_fn=collate)


def fit(num_devices, options, module_options, folder, num_steps=2, **trainer_options):
    module = Texts(**module_options)
    trainer = fits.trainer(num_devices, BY_TOKENS | options, max_steps=num_steps, **trainer_options)
    loaders = [loader(module.shifts_labels, by_bounds=module.by_bounds) for _ in range(2)]
    trainer.fit(module, *loaders)
    trainer.save_checkpoint(f"{folder}/last.ckpt", weights_only=True)
    report = trainer.strategy.report()
    return {"read": module.read, "num_microbatches": report["num_microbatches"]}


def fit_each_text_alone(num_replicas):
    """Return the weights after two steps in which each text is a batch of its own."""
    module = Texts()
    optimizer, batches = module.configure_optimizers(), []
    for replica in range(num_replicas):
        set_replica(replica, num_replicas)
        batches.append([*islice(sampler(), 2)])
    forget_replica()
    for texts in zip(*batches, strict=True):
        items = [ITEMS[index] for part in texts for index in part]
        inputs = [{name: torch.tensor([value]) for name, value in item.items()} for item in items]
        total = sum(int(each["labels"][:, 1:].ne(-100).sum()) for each in inputs)
        (sum(module.loss(each, "sum") for each in inputs) / total).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


@pytest.mark.parametrize(
    ("num_devices", "options", "module_options"),
    [
        (4, {"data_parallel_size": 2, "schedule": "zb_h1"}, {}),
        slow((1, {"schedule": "1f1b"}, {})),
        slow((2, {"schedule": "zb_v"}, {"shifts_labels": True})),
        slow((2, {"schedule": "auto"}, {})),
        slow((2, {"schedule": "zb_h1"}, {"by_bounds": True})),
    ],
)
def test_texts_train_as_if_each_was_alone(ranks, tmp_path, num_devices, options, module_options):
    done = ranks(num_devices).run(fit, num_devices, options, module_options, str(tmp_path))
    assert done[0]["num_microbatches"] == ROWS
    found = dict(torch.load(tmp_path / "last.ckpt")["state_dict"])
    alone = fit_each_text_alone(options.get("data_parallel_size", 1))
    torch.testing.assert_close(found, dict(alone), rtol=1e-12, atol=1e-14)


def test_a_replica_weighs_by_weights_that_are_computed_once_and_sent_from_its_device():
    weighed, sent = [], []

    def weigh(row):
        weighed.append(row)
        return float(row)

    def gather_tensor(own, differentiable):
        sent.append(own)
        return torch.stack([own, 3 * own])

    replicas = SimpleNamespace(gather_tensor=gather_tensor)
    group = SimpleNamespace(num_replicas=2, device=torch.device("meta"), replicas=replicas)
    cutter = SimpleNamespace(packs_rows=lambda kind: True)
    weights = MicrobatchWeights(torch.nn.Identity(), weigh)
    assert weights.shares([1, 3], [1, 1], are_packed=True) == [0.25, 0.75]
    Split.replica_loss_factor(SimpleNamespace(group=group, cutter=cutter, loss_weights=weights))
    assert weighed == [1, 3]
    assert [each.device for each in sent] == [group.device]


def resume(num_devices, folder):
    """Fit an epoch at once, and in two fits; return what each has read."""
    options = {"num_sanity_val_steps": 0, "limit_val_batches": 0, "enable_checkpointing": False}
    whole = fit(num_devices, {"schedule": "1f1b"}, {}, folder, num_steps=6, **options)["read"]
    first, second = Texts(), Texts()
    for module, steps, path in ((first, 2, None), (second, 6, f"{folder}/within.ckpt")):
        trainer = fits.trainer(
            num_devices, BY_TOKENS | {"schedule": "1f1b"}, max_steps=steps, **options
        )
        callback = L.pytorch.callbacks.ModelCheckpoint(folder, "within", every_n_train_steps=2)
        trainer.callbacks.append(callback)
        trainer.fit(module, loader(), ckpt_path=path)
    return whole, [*first.read, *second.read]


def test_an_epoch_that_is_resumed_reads_each_text_once(ranks, tmp_path):
    whole, parts = ranks(2).run(resume, 2, str(tmp_path))[0]
    assert parts == whole


def test_an_epoch_goes_on_with_the_same_rows_only(tmp_path):
    options = {"num_sanity_val_steps": 0, "limit_val_batches": 0}
    saving = fits.trainer(1, BY_TOKENS, max_steps=1, **options)
    callback = L.pytorch.callbacks.ModelCheckpoint(tmp_path, "within", every_n_train_steps=1)
    saving.callbacks.append(callback)
    saving.fit(Texts(), loader())
    path = tmp_path / "within.ckpt"
    by_rows = BY_TOKENS | {"num_microbatches": 2}
    going_on = fits.trainer(1, by_rows, max_steps=2, **options)
    message = r"num_rows=4, 1 replicas and max_tokens=24, and goes on with num_rows=2"
    with pytest.raises(ValueError, match=message):
        going_on.fit(Texts(), loader(num_rows=2), ckpt_path=path)


class Joined(Texts):
    """A batch is the rows of two loaders."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {name: torch.cat([part[name] for part in batch]) for name in batch[0]}


def test_an_epoch_of_two_loaders_goes_on_with_the_rows_of_each(tmp_path):
    read = []
    for steps, path in ((1, None), (2, tmp_path / "within.ckpt"), (2, None)):
        module = Joined()
        options = {"limit_val_batches": 0, "max_steps": steps}
        trainer = fits.trainer(1, BY_TOKENS | {"num_microbatches": "auto"}, **options)
        if steps == 1:
            saving = {"filename": "within", "every_n_train_steps": 1}
            trainer.callbacks.append(L.pytorch.callbacks.ModelCheckpoint(tmp_path, **saving))
        trainer.fit(module, [loader(num_rows=2), loader(num_rows=4)], ckpt_path=path)
        read.append(module.read)
    assert read[0] + read[1] == read[2]


@pytest.mark.parametrize("kind", ["training_step", slow("validation_step")])
def test_a_model_that_looks_past_a_texts_start_is_refused(kind):
    module = Texts(use_cache=True, dropout=0.5)
    trainer = fits.trainer(1, BY_TOKENS, max_steps=1, num_sanity_val_steps=2)
    validation = loader() if kind == "validation_step" else None
    with pytest.raises(ValueError, match=f"in {kind} the texts of a packed row see each other"):
        trainer.fit(module, loader(), validation)


def test_the_bytes_of_a_dense_mask_are_noted_once(monkeypatch, caplog):
    of_row = 8 * TOKENS**2
    monkeypatch.setattr(packed_row_checks, "_MASK_BYTES", of_row / 4)
    fits.trainer(1, BY_TOKENS, max_steps=2, limit_val_batches=0).fit(Texts(), loader())
    assert caplog.text.count("in training_step gets a dense mask of a packed row: ") == 1
    assert f"or rows of at most {TOKENS // 2} tokens" in caplog.text


def test_a_mask_may_be_given_by_name():
    query, mask = torch.zeros(1, 1, 4, 2), torch.ones(4, 4, dtype=torch.bool)
    with DenseMasks() as masks:
        scaled_dot_product_attention(query=query, key=query, value=query, attn_mask=mask)
    assert masks.num_bytes == 4 * 4 * 4


def test_the_check_gives_up_where_no_row_has_two_texts(caplog):
    asked = []

    def agree(flag, unanimous):
        asked.append(flag)
        return flag

    group = SimpleNamespace(world=SimpleNamespace(agree=agree), is_global_zero=True)
    cutter = SimpleNamespace(packs_rows=lambda kind: True)
    check = PackedRowCheck(None, None, SimpleNamespace(group=group, cutter=cutter), None)
    batch = {name: torch.arange(6).repeat(2, 1) for name in ("input_ids", "position_ids", "labels")}
    for _ in range(20):
        check.check_first_batch(StepInputs("training_step", batch, None, 0))
    assert asked == [False] * 8
    assert caplog.text.count("in training_step is not checked") == 1


def test_what_runs_for_the_check_leaves_no_trace():
    """A module that counts its steps, and draws in them, trains as without the check."""

    class Counting(Texts):
        num_steps = 0

        def training_step(self, batch, batch_idx):
            self.num_steps += 1
            loss = super().training_step(batch, batch_idx) * (1 + torch.rand(()))
            self.log("loss", loss)
            return loss

    module = Counting()
    trainer = fits.trainer(1, BY_TOKENS | {"schedule": "1f1b"}, max_steps=1)
    trainer.fit(module, loader())
    assert module.num_steps == ROWS
    assert set(trainer.logged_metrics) == {"loss"}


def test_predictions_are_of_rows():
    module = Texts()
    module.predict_step = lambda batch, batch_idx: module.model(**batch).logits.argmax(-1)
    trainer = fits.trainer(1)  # they are no means: microbatches need no weight
    predictions = trainer.predict(module, loader())
    assert torch.cat(predictions).shape == (len(sampler()) * ROWS, TOKENS)
    assert len(trainer.predict(module, padded())) == len(TEXTS) // ROWS  # by another entry


@pytest.mark.parametrize("num_rows", [2, 10])
def test_an_evaluation_has_more_rows_or_fewer_than_a_plan_has_microbatches(num_rows):
    module, rows = Texts(), loader(num_rows=num_rows)
    (found,) = fits.trainer(1, BY_TOKENS, limit_val_batches=1).validate(module, rows)
    batch = next(iter(rows))
    parts = [{name: value[n : n + 1] for name, value in batch.items()} for n in range(num_rows)]
    with torch.no_grad():
        total = sum(module.loss(part, "sum") for part in parts)
    assert found["val_loss"] == pytest.approx(float(total / batch["labels"].ne(-100).sum()))


def with_torchs_collate():
    return DataLoader(ITEMS, batch_sampler=sampler())


def of_other_rows():
    return DataLoader(ITEMS, batch_sampler=sampler(), collate_fn=PackedRows(ROWS, 2 * TOKENS))


def of_other_texts():
    return DataLoader(ITEMS[1:], batch_sampler=sampler(), collate_fn=PackedRows(ROWS, TOKENS))


def of_minibatches():
    return DataLoader(ITEMS, batch_sampler=MinibatchSampler([5] * len(ITEMS), 16))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (loader, {}, 'give the strategy microbatch_weight="tokens"'),
        (loader, BY_TOKENS | {"num_microbatches": 2}, "num_microbatches=2 with PackedRows"),
        (loader, BY_TOKENS | {"make_microbatches": lambda b, n: [b]}, "leave out make_microbatch"),
        (with_torchs_collate, BY_TOKENS, "collate_fn=default_collate do not go together"),
        (of_minibatches, BY_TOKENS, "MinibatchSampler makes minibatches for strategy=.odc."),
        (of_other_rows, BY_TOKENS, "PackedRowsSampler has max_tokens=.* give both the same"),
        (of_other_texts, BY_TOKENS, "lengths of .* texts, and the loader's dataset has"),
    ],
)
def test_settings_that_do_not_go_with_packed_rows_are_refused(make, options, message):
    trainer = fits.trainer(1, options, max_steps=1)
    with pytest.raises(ValueError, match=message):
        trainer.fit(Texts(), make())


def padded():
    return DataLoader([{"input_ids": torch.tensor(text[:3])} for text in TEXTS], ROWS)


@pytest.mark.parametrize(
    ("loaders", "options", "message"),
    [
        ([loader], {}, 'give the strategy microbatch_weight="tokens"'),
        (
            [loader],
            BY_TOKENS | {"make_microbatches": lambda b, n: [b]},
            "leave out make_microbatch",
        ),
        ([padded, loader], BY_TOKENS, "some loaders of a run make packed rows"),
        ([loader, padded], BY_TOKENS, "some loaders of a run make packed rows"),
    ],
)
def test_evaluations_that_do_not_go_with_packed_rows_are_refused(loaders, options, message):
    with pytest.raises(ValueError, match=message):
        fits.trainer(1, options).validate(Texts(), [make() for make in loaders])
