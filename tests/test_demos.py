"""The demo's model and data."""

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_pipeoffload.demos import GPT, PythonSource, Windows, find_source_files, split_files
from tests.support import fits

SIZES = {"context": 16, "width": 16, "depth": 2, "heads": 2}


def fit(module, **options):
    trainer = Trainer(**fits.SILENT, devices=1, enable_checkpointing=False, **options)
    trainer.fit(module, datamodule=PythonSource(context=16, batch_size=8, num_val_windows=16))
    return trainer


def test_loss_falls_and_the_model_comes_back_from_a_checkpoint(tmp_path):
    torch.manual_seed(0)
    module = GPT(**SIZES, tie_weights=True, learning_rate=1e-2, max_steps=30, warmup_steps=2)
    trainer = fit(module, max_steps=30, val_check_interval=30, limit_val_batches=2)
    assert trainer.callback_metrics["val_loss"] < 4.0  # nats; log(256) is 5.5
    assert {"train_loss", "val_accuracy"} <= {*trainer.callback_metrics}
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    loaded = GPT.load_from_checkpoint(tmp_path / "one.ckpt")
    assert loaded.hparams["learning_rate"] == 1e-2
    assert torch.equal(loaded.head.weight, trainer.lightning_module.head.weight)
    assert loaded.head.weight is loaded.token_embedding.weight


def test_gpt_sees_the_past_alone():
    module = GPT(**SIZES).eval()
    tokens = torch.zeros(1, 16, dtype=torch.long)
    changed = tokens.clone()
    changed[0, 8] = 1
    same = torch.isclose(module(tokens), module(changed)).all(dim=-1)[0]
    assert same.tolist() == [True] * 8 + [False] * 8


def test_learning_rate_rises_and_falls_to_a_tenth():
    module = GPT(**SIZES, warmup_steps=10, max_steps=100)
    factors = [module.learning_rate_factor(step) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[10] == 1.0
    assert factors[100] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 10, "heads": 4}, r"width \(10\) must be a multiple of heads \(4\)"),
        ({"max_steps": -1}, r"max_steps \(-1\) must be at least 1"),
    ],
)
def test_gpt_refuses_sizes_that_cannot_be(sizes, message):
    with pytest.raises(ValueError, match=message):
        GPT(**sizes)


def test_no_file_is_in_both_training_and_validation():
    files = find_source_files()
    train_files, val_files = split_files(files)
    assert set(train_files).isdisjoint(val_files)
    assert sorted(train_files + val_files) == sorted(files)
    assert 0.05 < len(val_files) / len(files) < 0.15


def test_batches_hold_text_and_its_continuation():
    source = PythonSource(context=32, batch_size=4)
    source.setup("fit")
    inputs, targets = next(iter(source.train_dataloader()))
    assert inputs.shape == targets.shape == (4, 32)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("num_windows", [None, 1, 3, 20])
def test_windows_stay_inside_the_text_and_reach_its_end(num_windows):
    windows = Windows(torch.arange(100, dtype=torch.uint8), context=8, num_windows=num_windows)
    assert len(windows) == (num_windows or 12)
    assert len(windows[len(windows) - 1][1]) == 8
    if (num_windows or 0) > 1:
        assert (windows[0][0][0], windows[num_windows - 1][1][-1]) == (0, 99)


def test_context_longer_than_the_text_is_refused():
    with pytest.raises(ValueError, match=r"context \(8\) must be less than the text's 8 bytes"):
        Windows(torch.zeros(8, dtype=torch.uint8), context=8)
