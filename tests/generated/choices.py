"""What a generated program is made of: for each feature one value, of which the first is plain."""

import random

# feature: (how often it is not plain, its values)
FEATURES = {
    "package": (0.15, ["lightning", "pytorch_lightning"]),
    # The model.
    "model": (0.1, ["own", "gpt2"]),
    "num_blocks": (0.6, [4, 2, 3, 5, 7]),
    "block": (
        0.7,
        ["mlp", "batchnorm", "attention", "own_attention", "encoder_layer", "gru", "conv", "einsum",
         "spectral_norm", "weight_norm", "autograd_function", "dropout", "adapter", "experts",
         "frozen"],
    ),
    "second_block": (0.25, [None, "linear", "conv", "batchnorm", "attention", "parameterless"]),
    "in_block": (
        0.3,
        [None, "buffer", "counter", "in_place", "checkpoint", "no_grad_part", "layer_drop",
         "assigned_buffer"],
    ),
    "returns": (0.3, ["tensor", "tuple", "tuple_with_none", "dict", "dataclass"]),
    "container": (
        0.25, ["list", *["sequential", "two_lists"] * 3, "attributes", "dict"],
    ),
    "call": (
        0.5,
        ["plain", "gates", "mask", "mask_by_name", "bias", "skips", "collect", "checkpoint",
         "fills_list", "residual_outside", "scale_from_batch", "reads_list", "fills_cache"],
    ),
    "input": (0.4, ["dense", "tokens", "tokens_tied", "list_of_samples"]),
    "position": (0.2, [None, "parameter", "buffer", "shared_module"]),
    "head": (0.25, ["linear", "norm_linear", "batchnorm", "two_heads"]),
    "made_in": (0.12, ["init", "configure_model"]),
    "unused": (0.1, [False, True]),
    # The step.
    "loss": (0.2, ["samples", "tokens", "auxiliary"]),
    "before": (0.25, [None, "counter", "buffer", "noise", "writes_batch", "own_generator"]),
    "after": (
        0.4, [None, "counter", "average", "list", "buffer", "extra_output", "dict_of_lists"],
    ),
    "log": (0.5, ["step", "both", "epoch", "bar_and_dict", "sum"]),
    "metric": (0.3, [None, "mean", "accuracy", "collection"]),
    "validation": (0.4, ["logs", "list", "metric", "generates", "none"]),
    # Data.
    "batch_size": (0.8, [4, 1, 2, 3, 5, 6, 8, 9]),
    "num_batches": (0.5, [3, 2, 4, 5]),
    "short_last": (0.5, [False, True]),
    "shape": (0.6, ["tuple", "dict", "list", "dataclass", "named_tuple", "nested"]),
    "extra": (0.25, [None, "strings", "number", "scalar_tensor", "per_sample_dicts"]),
    "loader": (0.15, ["plain", "shuffled", "own_batches"]),
    # Training.
    "optimizer": (0.5, ["sgd", "adam", "adamw_groups", "momentum", "adagrad"]),
    "scheduler": (0.4, [None, "step", "epoch", "plateau", "cosine_by_step"]),
    "clip": (0.3, [None, "norm", "value", "in_hook"]),
    "accumulate": (0.25, [1, 2, 3]),
    "precision": (0.1, ["64-true", "32-true", "bf16-mixed"]),
    "freeze": (0.2, [None, "first", "last_layers", "later", "thaw"]),
    "hooks": (
        0.3,
        [None, "reads_outputs", "reads_gradients", "grad_hook", "backward_hook",
         "shrinks_weights"],
    ),
    "callback": (
        0.4, [None, "early_stopping", "best_checkpoint", "rate_monitor", "swa", "ema", "top_two"],
    ),
    "epochs": (0.5, [2, 1, 3]),
    "flag": (
        0.35,
        [None, "no_sanity", "half_interval", "every_second_epoch", "limits", "max_steps",
         "min_epochs", "fast_dev_run", "no_val_sanity_all"],
    ),
    "entry": (
        0.6, ["fit", "all", "resume", "resume_in_epoch", "validate_first", "fit_twice",
              "predict_first", "load_and_test"],
    ),
    # The strategy.
    "devices": (0.5, [2, 1, 3, 4]),
    "schedule": (
        0.7, ["zb_h1", "auto", "1f1b", "zb_v", "interleaved_1f1b", "v_half", "gpipe", "zb_2p"],
    ),
    "num_microbatches": (0.3, ["auto", 1, 2, 3]),
    "option": (
        0.35, [None, "memory_limit", "cheap", "full", "offload_half", "offload_full",
               "post_validation", "even", "blocks", "optimizer_offload", "folder"],
    ),
    # After the others, whose draws stay the same.
    "views": (0.25, ["one", "two", "reference"]),
    "packed": (0.1, [False, True]),
    "batch_metric": (
        0.3, [None, "area", "mean_loss", "r2", "derived", "collection", "branch", "counts"],
    ),
    "guard": (0.2, [None, "isfinite", "isnan", "count"]),
    "empty": (0.1, [False, True]),  # a parameter without elements
    "lengths": (0.15, ["same", "uneven"]),
    "slices": (0.1, [1, 2, 3]),
}  # fmt: skip


def plain():
    """Return the simplest program's choices."""
    return {name: values[0] for name, (_, values) in FEATURES.items()}


def draw(seed):
    """Return the choices of a seed's program."""
    source = random.Random(seed)
    chosen = plain()
    # Half of the programs are busy; in a lean one features meet the plain way to do the rest.
    busy = 1.0 if seed % 2 else 0.5
    for name, (share, values) in FEATURES.items():
        drawn, value = source.random(), source.choice(values[1:])
        if drawn < share * (busy if share < 0.5 else 1.0):
            chosen[name] = value
    return consistent(chosen)


def consistent(chosen):
    """Return choices that make a program which runs on one device, and that the docs allow."""
    chosen = dict(chosen)
    for when, then in _RULES:
        if all(chosen[name] in values for name, values in when.items()):
            chosen |= then
    _fit_sizes(chosen)
    return chosen


_CHECKS_VAL_LOSS = ("early_stopping", "best_checkpoint", "top_two")
# Where all of these features have one of these values, others get these; in this order.
_RULES = [
    ({"packed": [True]}, {"block": "gru", "call": "mask"}),
    # What Python or one device cannot do.
    ({"model": ["gpt2"]},
     {"block": "mlp", "second_block": None, "in_block": None, "returns": "tensor",
      "container": "list", "call": "plain", "position": None, "made_in": "init"}),
    ({"model": ["gpt2"], "input": ["dense", "list_of_samples"]}, {"input": "tokens"}),
    ({"model": ["gpt2"], "option": ["blocks"]}, {"option": None}),
    ({"container": ["sequential"]}, {"call": "plain", "returns": "tensor"}),
    ({"call": ["gates", "residual_outside", "checkpoint"]}, {"returns": "tensor"}),
    ({"input": ["list_of_samples", "tokens", "tokens_tied"], "before": ["writes_batch"]},
     {"before": None}),
    ({"loss": ["auxiliary"], "returns": ["tensor", "tuple_with_none"]}, {"loss": "samples"}),
    ({"made_in": ["configure_model"]}, {"freeze": None, "hooks": None}),
    ({"made_in": ["configure_model"], "block": ["spectral_norm", "weight_norm"]},
     {"block": "mlp"}),
    ({"made_in": ["configure_model"], "callback": ["ema"]}, {"callback": None}),
    ({"hooks": ["backward_hook"], "model": ["gpt2"]}, {"hooks": None}),
    ({"hooks": ["backward_hook"], "call": ["mask", "mask_by_name"]}, {"hooks": None}),
    ({"precision": ["bf16-mixed"], "clip": ["in_hook"]}, {"clip": "norm"}),
    ({"extra": FEATURES["extra"][1][1:], "shape": ["tuple", "list", "named_tuple"]},
     {"shape": "dict"}),
    ({"extra": ["per_sample_dicts"], "shape": ["dataclass"]}, {"shape": "dict"}),
    # What Lightning refuses, or has no numbers for.
    ({"validation": ["none"], "callback": _CHECKS_VAL_LOSS}, {"callback": None}),
    ({"validation": ["none"], "scheduler": ["plateau"]}, {"scheduler": "epoch"}),
    ({"validation": ["none"], "entry": ["all", "validate_first"]}, {"entry": "fit"}),
    ({"validation": ["none"],
      "flag": ["half_interval", "every_second_epoch", "no_val_sanity_all"]}, {"flag": None}),
    ({"flag": ["fast_dev_run"]}, {"entry": "fit", "callback": None}),
    ({"flag": ["every_second_epoch"], "scheduler": ["plateau"]}, {"scheduler": "epoch"}),
    ({"flag": ["every_second_epoch"], "callback": _CHECKS_VAL_LOSS}, {"callback": None}),
    ({"entry": ["resume", "resume_in_epoch"], "flag": ["max_steps", "limits"]}, {"flag": None}),
    ({"callback": ["swa"]}, {"scheduler": None, "epochs": 3}),
    ({"callback": ["swa"], "entry": ["resume", "resume_in_epoch", "fit_twice"]},
     {"entry": "fit"}),
    ({"callback": ["swa"], "flag": ["max_steps", "fast_dev_run"]}, {"flag": None}),
    # What is refused by name, and has its test.
    ({"callback": ["swa"], "block": ["batchnorm"]}, {"callback": "ema"}),
    ({"callback": ["swa"], "second_block": ["batchnorm"]}, {"callback": "ema"}),
    ({"callback": ["swa"], "head": ["batchnorm"]}, {"callback": "ema"}),
    ({"callback": ["swa"], "option": ["optimizer_offload"]}, {"option": None}),
    ({"call": ["checkpoint"], "in_block": ["counter", "buffer", "assigned_buffer"]},
     {"in_block": None}),
    ({"call": ["checkpoint"], "block": ["spectral_norm", "batchnorm"]}, {"block": "mlp"}),
    ({"call": ["checkpoint"], "second_block": ["batchnorm"]}, {"second_block": None}),
    ({"in_block": ["checkpoint"], "block": ["spectral_norm", "batchnorm"]}, {"block": "mlp"}),
    ({"in_block": ["checkpoint"], "second_block": ["batchnorm"]}, {"second_block": None}),
    ({"option": ["full"], "in_block": ["counter", "buffer", "assigned_buffer"]},
     {"in_block": None}),
    ({"option": ["full"], "block": ["spectral_norm"]}, {"block": "mlp"}),
    ({"option": ["post_validation"], "clip": ["value", "in_hook"]}, {"clip": "norm"}),
    ({"option": ["post_validation"], "hooks": ["reads_gradients"]}, {"hooks": None}),
    ({"option": ["blocks"], "container": ["attributes", "dict", "two_lists"]},
     {"container": "list"}),
    ({"block": ["batchnorm"], "batch_size": [1]}, {"batch_size": 4}),
    ({"second_block": ["batchnorm"], "batch_size": [1]}, {"batch_size": 4}),
    ({"head": ["batchnorm"], "batch_size": [1]}, {"batch_size": 4}),
    # Lengths of which some are derived, and code that treats these differently.
    ({"input": ["list_of_samples"]}, {"lengths": "same"}),
    ({"model": ["gpt2"]}, {"lengths": "same", "slices": 1}),
    ({"lengths": ["uneven"], "position": ["parameter", "buffer"]}, {"position": None}),
    ({"lengths": ["uneven"]}, {"num_batches": 9, "packed": False}),
    # What runs on slices.
    ({"slices": [2, 3]},
     {"second_block": None, "in_block": None, "returns": "tensor", "container": "list",
      "call": "plain", "views": "one", "packed": False, "schedule": "seq_zb", "hooks": None}),
    ({"slices": [2, 3], "input": ["list_of_samples"]}, {"input": "dense"}),
    ({"slices": [2, 3], "position": ["parameter", "buffer"]}, {"position": None}),
    ({"slices": [2, 3],
      "block": [kind for kind in FEATURES["block"][1] if kind not in ("mlp", "einsum", "adapter")]},
     {"block": "own_attention"}),
    ({"schedule": ["interleaved_1f1b"]}, {"num_microbatches": "auto"}),
    # A last batch of one sample has no R2, and ranks of rounded values differ.
    ({"batch_metric": ["r2"], "batch_size": [1, 2]}, {"batch_metric": "mean_loss"}),
    ({"batch_metric": ["area", "collection"], "precision": ["bf16-mixed"]},
     {"batch_metric": "mean_loss"}),
]  # fmt: skip


def _fit_sizes(chosen):
    """A first batch is cut into equal microbatches, and each stage has a block."""
    devices, size = chosen["devices"], chosen["batch_size"]
    if chosen["schedule"] == "interleaved_1f1b":  # a multiple of the ranks
        chosen["batch_size"] = -(-size // devices) * devices
    if chosen["num_microbatches"] != "auto" and size % chosen["num_microbatches"]:
        chosen["num_microbatches"] = "auto"
    chunks = 2 if chosen["schedule"] in ("zb_v", "interleaved_1f1b", "v_half") else 1
    chosen["num_blocks"] = max(chosen["num_blocks"], chunks * devices if devices > 1 else 1)


def is_random(chosen):
    """Whether the docs derive its random numbers, so that one device is no reference."""
    return (
        chosen["block"] == "dropout"
        or chosen["in_block"] == "layer_drop"
        or chosen["before"] in ("noise", "own_generator")
        or chosen["loader"] == "shuffled"
    )
