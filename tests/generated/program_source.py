"""The source text of a generated program: a module's steps, its data, and what a person runs."""

from pprint import pformat

from tests.generated.model_source import all_blocks, blocks_source, forward_lines, init_lines

_HEADER = '''"""A generated program{name}: run it, and it compares one device with its ranks.

`python FILE` compares, `python -m tests.generated shrink FILE` drops what it does not need.
"""

import copy
from collections import namedtuple
from dataclasses import dataclass

import {package} as L
import torch
from {callbacks} import callbacks
from torch import nn
from torch.nn import functional
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric, MetricCollection, R2Score, SumMetric
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, MulticlassAccuracy
{more}
CHOSEN = {chosen}
DEVICES = {devices}
STRATEGY = {strategy}
SEEN = []  # what hooks have seen

'''

_FOOTER = """

if __name__ == "__main__":
    from tests.generated.verdict import print_verdict

    print_verdict(__file__)
"""


def program_source(chosen, plain, name=""):
    """Return a program's text.

    Args:
        chosen: The value of each feature.
        plain: The plain program's values, which the text does not repeat.
        name: Where it comes from, such as ", seed 3".
    """
    different = {key: value for key, value in chosen.items() if value != plain[key]}
    parts = [
        _HEADER.format(
            name=name,
            package=chosen["package"],
            callbacks={"lightning": "lightning.pytorch"}.get(chosen["package"], chosen["package"]),
            more="import transformers\n" if chosen["model"] == "gpt2" else "",
            chosen=pformat(different, width=96),
            devices=chosen["devices"],
            strategy=_strategy(chosen),
        ),
        blocks_source(chosen),
        _net(chosen),
        _data(chosen),
        _play(chosen),
        _FOOTER,
    ]
    return "".join(parts)


def _strategy(chosen):
    options = {"schedule": chosen["schedule"]}
    if chosen["slices"] > 1:
        options["num_sequence_slices"] = chosen["slices"]
    if chosen["num_microbatches"] != "auto":
        options["num_microbatches"] = chosen["num_microbatches"]
    if chosen["container"] == "two_lists":
        options["blocks"] = ["encoder.*", "decoder.*"]
    options |= {
        "memory_limit": {"memory_limit": "1GiB"},
        "cheap": {"recompute": "cheap"},
        "full": {"recompute": "full"},
        "offload_half": {"offload": "half"},
        "offload_full": {"offload": "full"},
        "post_validation": {"optimizer_sync": "post_validation"},
        "even": {"split": "even"},
        "blocks": {"blocks": "blocks"},
        "optimizer_offload": {"optimizer_offload": True},
        "folder": {"save_distributed_checkpoint": True},
    }.get(chosen["option"], {})
    return repr(options)


def _method(head, lines):
    return [f"    def {head}:", *(f"        {line}" for line in lines), ""] if lines else []


def _net(chosen):
    parts = init_lines(chosen) + _frozen_at_first(chosen) + _hooks_made(chosen)
    state = _state_lines(chosen)
    lines = ["\nclass Net(L.LightningModule):"]
    if chosen["made_in"] == "configure_model":
        lines += _method("__init__(self)", ["super().__init__()", "self.enter = None", *state])
        made = ["if self.enter is not None:", "    return", *parts]
        lines += _method("configure_model(self)", made)
    else:
        lines += _method("__init__(self)", ["super().__init__()", *parts, *state])
    lines += _method("forward(self, x, mask)", forward_lines(chosen))
    lines += _method("losses_of(self, batch)", _losses(chosen))
    lines += _method("training_step(self, batch, batch_idx)", _training(chosen))
    measured = _BATCH_METRICS.get(chosen["batch_metric"], ([], []))[1]
    lines += _method("measure(self, loss, pooled, y)", measured)
    lines += _evaluation(chosen)
    lines += _method("configure_optimizers(self)", _optimizers(chosen))
    lines += _hooks(chosen)
    text = "\n".join(lines) + "\n"
    if chosen["input"] == "list_of_samples":  # else Lightning takes the first sample's length
        text = text.replace('_loss", loss', '_loss", loss, batch_size=len(y)')
        text = text.replace('_loss", again', '_loss", again, batch_size=len(y)')
    return text


def _state_lines(chosen):
    lines = {
        "counter": ["self.count = 0"],
        "buffer": ['self.register_buffer("num_seen", torch.zeros(()))'],
        "own_generator": ["self.generator = torch.Generator().manual_seed(3)"],
    }.get(chosen["before"], [])
    lines += {
        "counter": ["self.count_after = 0"],
        "average": ["self.average = torch.zeros(())"],
        "list": ["self.losses = []"],
        "buffer": ['self.register_buffer("running", torch.zeros(()))'],
        "dict_of_lists": ['self.kept = {"loss": [], "size": []}'],
    }.get(chosen["after"], [])
    lines += {
        "mean": ["self.metric = MeanMetric()"],
        "accuracy": ['self.metric = MulticlassAccuracy(12, average="micro")'],
        "collection": [
            'made = {"mean": MeanMetric(), "again": MeanMetric()}',
            "self.metric = MetricCollection(made)",
        ],
    }.get(chosen["metric"], [])
    lines += _BATCH_METRICS.get(chosen["batch_metric"], ([], []))[0]
    if chosen["batch_metric"]:
        lines += ["self.val_whole = BinaryAUROC()"]
    if chosen["validation"] == "list":
        lines += ["self.outputs = []"]
    if chosen["validation"] == "metric":
        lines += ["self.val_mean = MeanMetric()"]
    return lines


def _frozen_at_first(chosen):
    blocks = all_blocks(chosen)
    return {
        "first": ["self.enter.requires_grad_(False)"],
        "last_layers": [f"for block in list({blocks})[-2:]:", "    block.requires_grad_(False)"],
        "thaw": [f"list({blocks})[0].requires_grad_(False)"],
    }.get(chosen["freeze"], [])


def _hooks_made(chosen):
    last = f"list({all_blocks(chosen)})[-1]"
    return {
        "grad_hook": [
            f"for parameter in {last}.parameters():",
            "    if parameter.requires_grad:",
            "        parameter.register_hook(lambda gradient: 0.5 * gradient)",
        ],
        "backward_hook": [
            f"{last}.register_full_backward_hook(",
            "    lambda module, into, out: tuple(None if g is None else 0.9 * g for g in into)",
            ")",
        ],
    }.get(chosen["hooks"], [])


_UNPACKED = {
    "tuple": "x, mask, y = batch",
    "list": "x, mask, y = batch",
    "named_tuple": "x, mask, y = batch.x, batch.mask, batch.y",
    "dataclass": "x, mask, y = batch.x, batch.mask, batch.y",
    "dict": 'x, mask, y = batch["x"], batch["mask"], batch["y"]',
    "nested": '(x, mask), y = batch["inputs"], batch["y"]',
}
_PADDED = "x = torch.stack([functional.pad(rows, (0, 0, 0, 4 - len(rows))) for rows in x])"


def _losses(chosen):
    lines = [_UNPACKED[chosen["shape"]]]
    if chosen["input"] == "list_of_samples":
        lines += [_PADDED]
    # Written before the blocks, in training only.
    before = {
        "counter": ["self.count += 1"],
        "buffer": ["self.num_seen.add_(len(y))"],
        "writes_batch": ["x.mul_(0.5)"],
        "noise": [_noise(chosen, "")],
        "own_generator": [_noise(chosen, ", generator=self.generator")],
    }.get(chosen["before"], [])
    if before:
        lines += ["if self.training:", *(f"    {line}" for line in before)]
    field = 'batch["extra"]' if chosen["shape"] in ("dict", "nested") else "batch.extra"
    lines += {
        "number": [f"y = (y * {field}) % 12"],
        "scalar_tensor": [f"y = (y + {field}) % 12"],
        "strings": [f"y = (y + torch.tensor([len(name) for name in {field}])) % 12"],
        "per_sample_dicts": [f'y = (y + torch.stack([each["add"] for each in {field}])) % 12'],
    }.get(chosen["extra"], [])
    lines += ["logits, pooled, extra = self(x, mask)"]
    if chosen["lengths"] == "uneven":
        lines += ["if 12 <= x.shape[1] <= 14:", "    extra = extra + pooled.square().mean(-1)"]
    lines += {
        "two": [
            "_, other, more = self(x.flip(1), mask)",
            "pooled, extra = pooled + 0.5 * other, extra + more",
        ],
        "reference": [
            "with torch.no_grad():",
            "    reference, _, _ = self(x.flip(1), mask)",
            "extra = extra + (logits - reference).pow(2).mean((1, 2))",
        ],
    }.get(chosen["views"], [])
    lines += ['each = functional.cross_entropy(pooled, y, reduction="none") + 0.1 * extra']
    if chosen["guard"]:
        lines += [f"if {_GUARDS[chosen['guard']]}:", "    each = torch.full_like(each, 9.0)"]
    if chosen["loss"] == "tokens":
        lines += [
            "if self.training:",
            "    targets = y[:, None].expand(mask.shape)",
            "    of_places = functional.cross_entropy(",
            '        logits.transpose(1, 2), targets, reduction="none"',
            "    )",
            "    return (of_places * mask).sum() / mask.sum(), each.detach(), pooled, y",
        ]
    return [*lines, "return each.mean(), each.detach(), pooled, y"]


_GUARDS = {
    "isfinite": "not torch.isfinite(each).all()",
    "isnan": "each.isnan().any() or torch.isinf(each).any()",
    "count": "(~each.isfinite()).sum() > 0",
}
_OF_EPOCH = "on_step=False, on_epoch=True"
# What makes them, and the lines of a step; by feature.
_BATCH_METRICS = {
    "area": (
        ["self.whole = BinaryAUROC()"],
        ['self.log("area", self.whole(pooled[:, 0], (y > 5).long()), on_step=True)'],
    ),
    "mean_loss": (
        ["self.whole = MeanMetric()"],
        ["self.whole.update(loss)", f'self.log("mean_loss", self.whole, {_OF_EPOCH})'],
    ),
    "r2": (
        ["self.whole = R2Score()"],
        [f'self.log("r2", self.whole(pooled[:, 0], pooled[:, 1] + y), {_OF_EPOCH})'],
    ),
    "derived": (
        ["self.whole = BinaryAccuracy()"],
        [
            "right = self.whole(pooled[:, 0], (y > 5).long())",
            f'self.log("error", 100 * (1 - right), {_OF_EPOCH})',
            'self.log("right_itself", self.whole)',
        ],
    ),
    "collection": (
        [
            'of_batch = {"right": BinaryAccuracy(), "area": BinaryAUROC()}',
            'self.whole = MetricCollection(of_batch, prefix="of_")',
        ],
        [f"self.log_dict(self.whole(pooled[:, 0], (y > 5).long()), {_OF_EPOCH})"],
    ),
    "branch": (
        ["self.whole = BinaryAccuracy()"],
        [
            "right = self.whole(pooled[:, 0], (y > 5).long())",
            f'self.log("right_also", right, {_OF_EPOCH})',
            "if right > 2:",
            '    raise ValueError("more than all are right")',
        ],
    ),
    "counts": (
        ["self.whole, self.mean_size = SumMetric(), MeanMetric()"],
        [
            "self.whole.update((pooled.argmax(-1) == y).sum())",
            "self.mean_size.update(loss, len(y))",
            f'self.log("num_right", self.whole, {_OF_EPOCH})',
            f'self.log("by_size", self.mean_size, {_OF_EPOCH})',
        ],
    ),
}


def _noise(chosen, generator):
    if chosen["input"].startswith("tokens"):
        return f"x = torch.where(torch.rand(x.shape{generator}) < 0.2, 0, x)"
    return f"x = x + 0.1 * torch.randn(x.shape{generator}, dtype=x.dtype)"


def _training(chosen):
    lines = ["loss, each, pooled, y = self.losses_of(batch)"]
    if chosen["empty"]:
        lines += ["loss = loss + self.empty.sum()"]
    lines += {
        "counter": ["self.count_after += 1"],
        "average": ["self.average = 0.9 * self.average + 0.1 * loss.detach()"],
        "list": ["self.losses.append(loss.detach())"],
        "buffer": ["self.running.mul_(0.9).add_(0.1 * loss.detach())"],
        "dict_of_lists": [
            'self.kept["loss"].append(loss.detach())',
            'self.kept["size"].append(len(y))',
        ],
    }.get(chosen["after"], [])
    lines += ["self.measure(loss, pooled, y)"] if chosen["batch_metric"] else []
    update = "pooled.detach(), y" if chosen["metric"] == "accuracy" else "each"
    if chosen["metric"]:
        log = (
            "log_dict(self.metric"
            if chosen["metric"] == "collection"
            else 'log("metric", self.metric'
        )
        lines += [f"self.metric.update({update})", f"self.{log}, on_step=False, on_epoch=True)"]
    lines += {
        "step": ['self.log("train_loss", loss)'],
        "both": ['self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)'],
        "epoch": ['self.log("train_loss", loss, on_step=False, on_epoch=True)'],
        "bar_and_dict": [
            'numbers = {"train_loss": loss, "right": (pooled.argmax(-1) == y).double().mean()}',
            "self.log_dict(numbers, prog_bar=True, on_step=True, on_epoch=True)",
        ],
        "sum": [
            'self.log("train_loss", loss)',
            'self.log("num", float(len(y)), reduce_fx="sum", on_step=False, on_epoch=True)',
        ],
    }[chosen["log"]]
    if chosen["after"] == "extra_output":
        return [*lines, 'return {"loss": loss, "largest": pooled.detach().mean()}']
    return [*lines, "return loss"]


def _evaluation(chosen):
    losses = "loss, each, pooled, y = self.losses_of(batch)"
    logged = 'self.log("val_loss", loss)'
    whole = 'self.log("val_area", self.val_whole(pooled[:, 0], (y > 5).long()), batch_size=len(y))'
    of_batch = [whole] if chosen["batch_metric"] and chosen["precision"] != "bf16-mixed" else []
    bodies = {
        "logs": [losses, *of_batch, logged],
        "list": [losses, "self.outputs.append(each)"],
        "metric": [
            losses,
            "self.val_mean.update(each)",
            logged,
            'self.log("val_mean", self.val_mean)',
        ],
        "generates": [
            losses,
            "again, _, _, _ = self.losses_of(batch)",
            'self.log("val_loss", again)',
        ],
    }
    lines = []
    if chosen["validation"] in bodies:
        lines += _method("validation_step(self, batch, batch_idx)", bodies[chosen["validation"]])
    if chosen["validation"] == "list":
        ending = ["mean = torch.cat(self.outputs).mean()", "SEEN.append(mean)"]
        ending += ['self.log("val_loss", mean)', "self.outputs.clear()"]
        lines += _method("on_validation_epoch_end(self)", ending)
    tested = [losses, 'self.log("test_loss", loss, on_step=True, on_epoch=True)']
    lines += _method("test_step(self, batch, batch_idx)", tested)
    unpacked = [_UNPACKED[chosen["shape"]]]
    unpacked += [_PADDED] if chosen["input"] == "list_of_samples" else []
    returned = 'return {"logits": pooled, "names": batch["extra"]}'
    named = chosen["extra"] == "strings" and chosen["shape"] in ("dict", "nested")
    returned = returned if named else "return pooled"
    predicted = [*unpacked, "_, pooled, _ = self(x, mask)", returned]
    return lines + _method("predict_step(self, batch, batch_idx)", predicted)


def _optimizers(chosen):
    lines = {
        "sgd": ["optimizer = torch.optim.SGD(self.parameters(), lr=0.1)"],
        "momentum": ["optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)"],
        "adam": ["optimizer = torch.optim.Adam(self.parameters(), lr=0.01, eps=1e-4)"],
        "adagrad": ["optimizer = torch.optim.Adagrad(self.parameters(), lr=0.05, eps=1e-4)"],
        "adamw_groups": [
            "decayed = [p for p in self.parameters() if p.ndim > 1]",
            "rest = [p for p in self.parameters() if p.ndim <= 1]",
            'groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]',
            "optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4)",
        ],
    }[chosen["optimizer"]]
    kinds = {
        "step": ("StepLR(optimizer, 2, 0.7)", '"interval": "step"'),
        "epoch": ("ExponentialLR(optimizer, 0.8)", '"interval": "epoch"'),
        "plateau": (
            "ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)",
            '"monitor": "val_loss"',
        ),
        "cosine_by_step": (
            "CosineAnnealingLR(optimizer, 6)",
            '"interval": "step", "frequency": 2, "name": "rate"',
        ),
    }
    if not chosen["scheduler"]:
        return [*lines, "return optimizer"]
    made, how = kinds[chosen["scheduler"]]
    return [
        *lines,
        f"scheduler = torch.optim.lr_scheduler.{made}",
        f'how = {{"scheduler": scheduler, {how}}}',
        'return {"optimizer": optimizer, "lr_scheduler": how}',
    ]


def _hooks(chosen):
    lines = []
    ending = {
        "list": ["SEEN.append(torch.stack(self.losses))", "self.losses.clear()"],
        "average": ["SEEN.append(self.average)"],
        "counter": ["SEEN.append(self.count_after)"],
        "dict_of_lists": ["SEEN.append(copy.deepcopy(self.kept))"],
    }.get(chosen["after"], [])
    ending += ["SEEN.append(self.count)"] if chosen["before"] == "counter" else []
    if chosen["in_block"] == "counter":
        ending += [f"SEEN.append([block.calls for block in {all_blocks(chosen)}])"]
    lines += _method("on_train_epoch_end(self)", ending)
    epoch = {"later": "False", "thaw": "True"}.get(chosen["freeze"])
    if epoch:
        first = f"list({all_blocks(chosen)})[0]"
        changed = ["if self.current_epoch == 1:", f"    {first}.requires_grad_({epoch})"]
        lines += _method("on_train_epoch_start(self)", changed)
    if chosen["clip"] == "in_hook":
        lines += [
            "    def configure_gradient_clipping(self, optimizer, *_, **__):",
            '        self.clip_gradients(optimizer, 0.3, gradient_clip_algorithm="norm")',
            "",
        ]
    lines += {
        "reads_outputs": _method(
            "on_train_batch_end(self, outputs, batch, batch_idx)",
            ['SEEN.append(float(outputs["loss"]))'],
        ),
        "reads_gradients": _method(
            "on_before_optimizer_step(self, optimizer)",
            [
                "norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]",
                "SEEN.append(torch.stack(norms).norm())",
            ],
        ),
        "shrinks_weights": _method(
            "on_train_batch_end(self, outputs, batch, batch_idx)",
            [
                "with torch.no_grad():",
                "    for parameter in self.parameters():",
                "        parameter.mul_(0.999)",
            ],
        ),
    }.get(chosen["hooks"], [])
    return lines


_BATCHES = {
    "tuple": "(x, mask, y)",
    "list": "[x, mask, y]",
    "named_tuple": "Fields(x, mask, y)",
    "dataclass": "Batch(x, mask, y{extra})",
    "dict": '{{"x": x, "mask": mask, "y": y{extra}}}',
    "nested": '{{"inputs": (x, mask), "y": y{extra}}}',
}
_DATA = """
Fields = namedtuple("Fields", ["x", "mask", "y"])


@dataclass
class Batch:
    x: object
    mask: torch.Tensor
    y: torch.Tensor
    extra: object = None


class Rows(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = {x}
        self.lengths = torch.randint(1, 5, (count,), generator=generator)
        self.y = torch.randint(12, (count,), generator=generator)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], int(self.lengths[index]), self.y[index]


def collate(samples):
    lengths = torch.tensor([length for _, length, _ in samples])
    {collated}
    mask = torch.arange({places}) < lengths[:, None]
    y = torch.stack([target for _, _, target in samples]){cut}
    return {batch}


"""
_CUT = """
    num_places = 6 + 2 * (int(y.sum()) % 9)  # as of padded texts
    x, mask = x[:, :num_places], mask[:, :num_places]"""
_EXTRAS = {
    "strings": '["a" * length for length in lengths.tolist()]',
    "number": "5",
    "scalar_tensor": "torch.tensor(3)",
    "per_sample_dicts": '[{"add": length} for length in lengths]',
}


def _data(chosen):
    tokens = chosen["input"].startswith("tokens")
    places = 24 if chosen["lengths"] == "uneven" else 4
    x = f"torch.randint(12, (count, {places}), generator=generator)"
    dense = f"torch.randn(count, {places}, 6, generator=generator, dtype={_dtype(chosen)})"
    collated = "x = torch.stack([row for row, _, _ in samples])"
    if chosen["input"] == "list_of_samples":
        collated = "x = [row[:length] for row, length, _ in samples]"
    extra = _EXTRAS.get(chosen["extra"], "")
    by_name = chosen["shape"] in ("dict", "nested")
    extra = extra and (f', "extra": {extra}' if by_name else f", {extra}")
    batch = _BATCHES[chosen["shape"]].format(extra=extra)
    cut = _CUT if chosen["lengths"] == "uneven" else ""
    text = _DATA.format(
        x=x if tokens else dense, places=places, collated=collated, cut=cut, batch=batch
    )
    size, batches = chosen["batch_size"], chosen["num_batches"]
    count = size * batches - (size // 2 if chosen["short_last"] else 0)
    made = f"torch.utils.data.DataLoader(rows, {size}, collate_fn=collate"
    first, second = f"{made})", f"{made})"
    if chosen["loader"] == "shuffled":
        first = f"{made}, shuffle=True)"
    if chosen["loader"] == "own_batches":
        parts = f"[rows[i] for i in range(start, min(start + {size}, {count}))]"
        batches = f"[collate({parts}) for start in range(0, {count}, {size})]"
        first = second = f"torch.utils.data.DataLoader({batches}, batch_size=None)"
    return text + _LOADERS.format(count=count, first=first, second=second)


_LOADERS = """def train_loader():
    rows = Rows({count}, 1)
    return {first}


def val_loader():
    rows = Rows({count}, 2)
    return {second}


"""


def _dtype(chosen):
    return "torch.float64" if chosen["precision"] == "64-true" else "torch.float32"


def _play(chosen):
    loaders = "train_loader()" if chosen["validation"] == "none" else "train_loader(), val_loader()"
    made = f"run.trainer({_trainer(chosen)}, callbacks=[{_callback(chosen)}])"
    fit = [f"trainer = {made}", f"trainer.fit(net, {loaders})"]
    quiet = ", verbose=False"
    results = [
        f'run.see("{name}", trainer.{name}(net, val_loader(){more}))'
        for name, more in [("validate", quiet), ("test", quiet), ("predict", "")]
    ]
    bare = f"trainer = run.trainer(precision={chosen['precision']!r})"
    again = [
        "net = Net()",
        f"trainer = run.trainer({_trainer(chosen, more=1)}, callbacks=[{_callback(chosen)}])",
    ]
    end = ['trainer.save_checkpoint(f"{run.folder}/end.ckpt")']
    lines = {
        "fit": fit + end,
        "all": [*fit, *end, *results],
        "resume": [
            *fit,
            *end,
            *again,
            f'trainer.fit(net, {loaders}, ckpt_path=f"{{run.folder}}/end.ckpt")',
        ],
        "resume_in_epoch": _killed(chosen, loaders),
        "validate_first": [bare, results[0], *fit, *end],
        "predict_first": [bare, results[2], *fit, *end],
        "fit_twice": [
            *fit,
            f"trainer.fit_loop.max_epochs = {chosen['epochs'] + 1}",
            f"trainer.fit(net, {loaders})",
            *end,
        ],
        "load_and_test": [
            *fit,
            *end,
            'net = Net.load_from_checkpoint(f"{run.folder}/end.ckpt", weights_only=False)',
            bare,
            results[1],
        ],
    }[chosen["entry"]]
    if chosen["entry"].startswith("resume"):
        lines += ['trainer.save_checkpoint(f"{run.folder}/resumed.ckpt")']
    body = ["L.seed_everything(7, workers=True, verbose=False)", "net = Net()", *lines]
    return "\n".join(["def play(run):", *(f"    {line}" for line in body)]) + "\n"


def _killed(chosen, loaders):
    """Save in the middle of an epoch, come no further, and go on in new objects."""
    steps = -(-chosen["num_batches"] // chosen["accumulate"])
    step = steps + 1 if chosen["epochs"] > 1 and steps > 1 else 1
    saving = f'callbacks.ModelCheckpoint(run.folder, "{{step}}", every_n_train_steps={step})'
    added = f"{_callback(chosen)}, {saving}" if _callback(chosen) else saving
    arguments = _trainer(chosen)
    return [
        f"trainer = run.trainer({arguments}, callbacks=[{added}, run.kill_after({step})])",
        f"run.survive(trainer.fit, net, {loaders})",
        "net = Net()",
        f"trainer = run.trainer({arguments}, callbacks=[{added}])",
        f'trainer.fit(net, {loaders}, ckpt_path=f"{{run.folder}}/step={step}.ckpt")',
    ]


def _trainer(chosen, more=0):
    options = {"max_epochs": chosen["epochs"] + more, "log_every_n_steps": 1}
    options |= {"precision": chosen["precision"]}
    if chosen["accumulate"] > 1:
        options["accumulate_grad_batches"] = chosen["accumulate"]
    options |= {
        "norm": {"gradient_clip_val": 0.5},
        "value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    }.get(chosen["clip"], {})
    options |= {
        "no_sanity": {"num_sanity_val_steps": 0},
        "half_interval": {"val_check_interval": 0.5},
        "every_second_epoch": {"check_val_every_n_epoch": 2},
        "limits": {"limit_train_batches": 2, "limit_val_batches": 1},
        "max_steps": {"max_steps": 3},
        "min_epochs": {"min_epochs": 2},
        "fast_dev_run": {"fast_dev_run": 2},
        "no_val_sanity_all": {"num_sanity_val_steps": -1},
    }.get(chosen["flag"], {})
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _callback(chosen):
    best = 'callbacks.ModelCheckpoint(run.folder, "best-{epoch}", "val_loss"'
    return {
        "early_stopping": 'callbacks.EarlyStopping("val_loss", min_delta=0.3, patience=1)',
        "best_checkpoint": f"{best})",
        "top_two": f"{best}, save_top_k=2, save_last=True)",
        "rate_monitor": 'callbacks.LearningRateMonitor("step")',
        "swa": "callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1)",
        "ema": "callbacks.EMAWeightAveraging(decay=0.9)",
    }.get(chosen["callback"], "")
