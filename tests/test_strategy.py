"""The strategy in real processes, against Lightning's own loop on one device."""

import gc
import json
import pickle
import weakref

import lightning as L
import pytest
import torch

from lightning_pipeoffload import PipeOffloadStrategy
from tests.support import fits
from tests.support.pairs import slow, some

EXACT = {"rel": 1e-10, "abs": 1e-12}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Without the strategy and without dropout, over the same batches."""
    folder = tmp_path_factory.mktemp("plain")
    return fits.fit(0, str(folder), module={"dropout": 0.0}) | {"folder": folder}


@pytest.mark.parametrize(
    ("num_ranks", "schedule"),
    [
        *((1, "zb_h1"), (2, "zb_v"), slow((4, "interleaved_1f1b"))),
        *map(
            slow, [(2, "1f1b"), (2, "gpipe"), (2, "interleaved_1f1b"), (2, "zb_h2"), (4, "zb_h1")]
        ),
    ],
)
def test_training_equals_one_device(ranks, plain, tmp_path, num_ranks, schedule):
    options = {"module": {"dropout": 0.0}, "schedule": schedule}
    results = ranks(num_ranks).run(_fit, num_ranks, str(tmp_path), options)
    for result in results:
        assert result["losses"] == pytest.approx(plain["losses"], **EXACT)
        assert result["rates"] == plain["rates"]
        assert result["batches"] == plain["batches"]
        assert result["metrics"] == pytest.approx(plain["metrics"], **EXACT)


def _fit(num_ranks, folder, options):
    return fits.fit(num_ranks, folder, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"offload": "full", "recompute": "cheap"},
        slow({"schedule": "po_h"}),
        slow({"memory_limit": "1GiB"}),
    ],
    ids=str,
)
def test_what_goes_to_the_host_comes_back_as_it_was(ranks, plain, tmp_path, options):
    options = {"module": {"dropout": 0.0}, **options}
    for result in ranks(2).run(_fit, 2, str(tmp_path), options):
        assert result["losses"] == pytest.approx(plain["losses"], **EXACT)


@pytest.mark.parametrize("data", some(["shuffled", "map", "stream"], 3))
def test_dropout_and_data_do_not_depend_on_the_number_of_ranks(ranks, tmp_path, data):
    options = {"data": {"kind": data}, "trainer": {"gradient_clip_val": None}}
    (expected,) = ranks(1).run(_fit, 1, str(tmp_path), options)
    for result in ranks(4).run(_fit, 4, str(tmp_path), {**options, "schedule": "1f1b"}):
        assert result["batches"] == expected["batches"]
        assert result["losses"] == expected["losses"]
    if data == "shuffled":
        assert expected["batches"][:5] != expected["batches"][5:]


@pytest.mark.parametrize(
    "options",
    [
        {"module": {"dropout": 0.0, "tie": True}},
        {"module": {"dropout": 0.0}, "data": {"batch_size": 12}},  # 40 samples: 12, 12, 12, 4
        {
            "module": {"dropout": 0.0},
            "data": {"batch_size": 12},
            "trainer": {"accumulate_grad_batches": 3},
        },
    ],
    ids=["tied weights", "a shorter last batch", "which accumulates alone"],
)
def test_other_fits_equal_one_device(ranks, tmp_path, options):
    expected = fits.fit(0, str(tmp_path), **options)
    for result in ranks(2).run(_fit, 2, str(tmp_path), options):
        assert result["losses"] == pytest.approx(expected["losses"], **EXACT)


def test_the_report_has_what_the_interface_names_and_each_rank_all_parameters(ranks, tmp_path):
    # Validation comes first, in microbatches of another size.
    options = {"data": {"batch_size": 16}}
    results = ranks(2).run(_fit, 2, str(tmp_path), options)
    whole = [name for name, _ in fits.Net().named_parameters()]
    assert [result["parameters"] for result in results] == [whole] * 2
    report = results[0]["report"]
    assert report["schedule"] == "zb_h1"
    assert (report["num_ranks"], report["num_chunks"], report["num_microbatches"]) == (2, 1, 4)
    assert sum(len(stage["blocks"]) for stage in report["stages"]) == 8
    assert 0 < report["bubble"] < 1
    assert json.loads(json.dumps(report, allow_nan=False))["samples_per_second"] > 0
    measured = report["measured"]
    assert report["memory"]["activations"] == measured["peak_activation_bytes"]
    assert sum(report["memory"]["parameters"]) == 8 * sum(
        stage["num_parameters"] for stage in report["stages"]
    )
    assert "live_bytes" not in measured
    assert measured["message_buffer_bytes"] == [0, 0]  # gloo needs none
    assert len(measured["step_seconds"]) == len(measured["peak_activation_bytes"]) == 2
    assert measured["deferred_flops"] == measured["weight_flops"]
    assert all(0 <= bubble < 1 for bubble in measured["bubble"])


def test_predictions_are_the_plain_modules_where_the_last_stage_is(ranks):
    predicted, elsewhere = ranks(2).run(_predict)
    assert elsewhere is None
    L.seed_everything(3, verbose=False)
    module = fits.Net(dropout=0.0).eval()
    expected = torch.cat([module.predict_step(batch, 0) for batch in fits.loader()])
    torch.testing.assert_close(predicted, expected.detach(), rtol=1e-12, atol=1e-12)


def _predict():
    L.seed_everything(3, verbose=False)
    module = fits.Net(dropout=0.0)
    trainer = fits.trainer(2, enable_checkpointing=True)
    outputs = trainer.predict(module, fits.loader())
    return None if outputs is None else torch.cat(outputs)


def test_a_second_fit_goes_on_and_saves_all(ranks, tmp_path):
    path = str(tmp_path / "second.ckpt")
    for first, second in ranks(2).run(_fit_twice, path):
        assert second < first
    state = torch.load(path, weights_only=False)["optimizer_states"][0]
    count = len(list(fits.Net(tie=True).parameters()))
    assert sorted(state["state"]) == list(range(count))
    assert sum(len(group["params"]) for group in state["param_groups"]) == count


def _fit_twice(path):
    L.seed_everything(3, verbose=False)
    module = fits.Net(dropout=0.0, tie=True)
    trainer = fits.trainer(2, max_epochs=1)
    losses = []
    for max_epochs in (1, 3):
        trainer.fit_loop.max_epochs = max_epochs
        trainer.fit(module, fits.loader(), fits.loader())
        losses.append(float(trainer.callback_metrics["val_loss"]))
    trainer.save_checkpoint(path)
    return losses


def test_metrics_are_on_the_device_from_the_start():
    strategy, module = PipeOffloadStrategy(parallel_devices=[torch.device("meta")]), fits.Net()
    strategy.connect(module)
    strategy.model_to_device()
    devices = module.accuracy.mean_value.device.type, module.head.weight.device.type
    assert devices == ("meta", "cpu")


def _group_of_a_fit():
    trainer = L.Trainer(**fits.SILENT, max_steps=2, strategy=PipeOffloadStrategy())
    trainer.fit(fits.Net(), fits.loader())
    return weakref.ref(trainer.strategy.group)  # whose connections have threads


def test_nothing_of_a_fit_is_left_when_nobody_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    group = _group_of_a_fit()
    gc.collect()
    assert group() is None


def test_a_trainer_whose_setup_has_failed_can_be_saved_and_used():
    trainer = fits.trainer(1, max_steps=1, limit_val_batches=0)
    without_blocks = fits.Net()
    del without_blocks.blocks
    with pytest.raises(ValueError, match="blocks"):
        trainer.fit(without_blocks, fits.loader())
    pickle.dumps(trainer)
    trainer.fit(fits.Net(), fits.loader())
    assert trainer.global_step == 1


def test_a_checkpoint_can_be_read_before_there_is_a_module(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "a.ckpt")
    assert PipeOffloadStrategy().load_checkpoint(tmp_path / "a.ckpt") == {"state_dict": {}}


def test_a_trainer_that_gets_another_module_lets_go_of_the_first():
    trainer = fits.trainer(1, max_steps=1, limit_val_batches=0)
    trainer.fit(fits.Net(), fits.loader())
    pipeline = weakref.ref(trainer.strategy.split.pipeline)
    trainer.strategy.connect(fits.Net())
    gc.collect()
    assert pipeline() is None
