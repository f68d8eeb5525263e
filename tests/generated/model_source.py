"""The source text of a generated program's model: its blocks, and how a LightningModule calls them.

Hidden states are ``[samples, 4, 6]``, or have up to 24 places, in a batch of ``x``, ``mask`` (which
places are filled) and ``y`` (a class for each sample).
"""

from textwrap import indent

# kind of block: (lines of __init__, lines of the forward, which compute y from x)
_CORES = {
    "mlp": (
        "self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)",
        "y = self.down(functional.gelu(self.up(self.norm(x))))",
    ),
    "linear": ("self.linear = nn.Linear(6, 6)", "y = torch.tanh(self.linear(x))"),
    "parameterless": ("", "y = 0.5 * torch.tanh(x)"),
    "batchnorm": (
        "self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)",
        "y = torch.relu(self.norm(self.linear(x).flatten(0, 1)).view_as(x))",
    ),
    "attention": (
        "self.attention = nn.MultiheadAttention(6, 2, batch_first=True)",
        "y = self.attention(x, x, x, need_weights=False)[0]",
    ),
    "own_attention": (
        "self.qkv = nn.Linear(6, 18)",
        "q, k, v = self.qkv(x).chunk(3, -1)\n"
        "y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
    ),
    "encoder_layer": (
        "self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)",
        "y = 0.5 * self.layer(x)",
    ),
    "gru": ("self.gru = nn.GRU(6, 6, batch_first=True)", "y = self.gru(x)[0]"),
    "conv": (
        "self.conv = nn.Conv1d(6, 6, 3, padding=1)",
        "y = torch.tanh(self.conv(x.transpose(1, 2)).transpose(1, 2))",
    ),
    "einsum": (
        "self.weight = nn.Parameter(0.3 * torch.randn(6, 6))",
        'y = torch.tanh(torch.einsum("bld,de->ble", x, self.weight))',
    ),
    "spectral_norm": (
        "self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))",
        "y = torch.tanh(self.linear(x))",
    ),
    "weight_norm": (
        "self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))",
        "y = torch.tanh(self.linear(x))",
    ),
    "autograd_function": ("self.linear = nn.Linear(6, 6)", "y = Swish.apply(self.linear(x))"),
    "dropout": (
        "self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.2)",
        "y = self.dropout(torch.tanh(self.linear(x)))",
    ),
    "adapter": (
        "self.weight = nn.Parameter(0.3 * torch.randn(6, 6), requires_grad=False)\n"
        "self.a = nn.Parameter(torch.zeros(6, 2))\n"
        "self.b = nn.Parameter(0.3 * torch.randn(2, 6))",
        "y = torch.tanh(functional.linear(x, self.weight + self.a @ self.b))",
    ),
    "experts": (
        "self.gate = nn.Linear(6, 2)\n"
        "self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))",
        "gates = self.gate(x).softmax(-1)\n"
        "y = torch.zeros_like(x)\n"
        "for index, expert in enumerate(self.experts):\n"
        "    chosen = gates.argmax(-1) == index\n"
        "    made = gates[chosen][:, index, None] * torch.tanh(expert(x[chosen]))\n"
        "    y[chosen] = made.to(y.dtype)",
    ),
    "frozen": (
        "self.linear = nn.Linear(6, 6).requires_grad_(False)",
        "y = torch.tanh(self.linear(x))",
    ),
}

_SWISH = """
class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        sigmoid = torch.sigmoid(x)
        return gradient * sigmoid * (1 + x * (1 - sigmoid))

"""

_OUTPUT = """
@dataclass
class Output:
    hidden: torch.Tensor
    extra: torch.Tensor

"""

_EXTRA = "y.pow(2).mean((1, 2))"  # a number for each sample
_RETURNS = {
    "tensor": "return x + y",
    "tuple": f"return x + y, {_EXTRA}",
    "tuple_with_none": "return x + y, None",
    "dict": f'return {{"hidden": x + y, "extra": {_EXTRA}}}',
    "dataclass": f"return Output(x + y, {_EXTRA})",
}
# What a block gets in addition to the hidden states, and does with it.
_ARGUMENTS = {
    "mask": ("mask", "y = y * mask[..., None]"),
    "mask_by_name": ("mask=None", "if mask is not None:\n    y = y * mask[..., None]"),
    "bias": ("bias", "y = y + bias"),
    "fills_list": ("states", f"states.append({_EXTRA})"),
    "reads_list": (
        "states",
        "if len(states) > 1:\n    y = y + 0.1 * states[-2][:, None, None]\n"
        f"states.append({_EXTRA})",
    ),
    "fills_cache": ("cache", "y = y / (1 + len(cache.states))\ncache.states.append(y)"),
}

_CACHE = """
class Cache:
    def __init__(self):
        self.states = []

"""
# A layer over sequences that are as long as their mask, which padding does not reach.
_PACKED = (
    "lengths = mask.sum(1).cpu()\n"
    "packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)\n"
    "y = rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=4)[0]"
)


_GPT2 = """
def gpt2(num_layers):
    sizes = {"vocab_size": 12, "n_embd": 6, "n_layer": num_layers, "n_head": 2, "n_positions": 8}
    dropouts = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    return transformers.GPT2Model(transformers.GPT2Config(**sizes, **dropouts))

"""


def blocks_source(chosen):
    """Return the classes of the blocks, and what they need."""
    if chosen["model"] == "gpt2":
        return _GPT2
    kinds = {"Block": chosen["block"], "OtherBlock": chosen["second_block"]}
    parts = [_SWISH] if chosen["block"] == "autograd_function" else []
    parts += [_OUTPUT] if chosen["returns"] == "dataclass" else []
    parts += [_CACHE] if chosen["call"] == "fills_cache" else []
    parts += [_block(name, kind, chosen) for name, kind in kinds.items() if kind]
    return "".join(parts)


def _block(name, kind, chosen):
    made, computed = _CORES[kind]
    if chosen["packed"] and (kind, chosen["call"]) == ("gru", "mask"):
        computed = _PACKED
    argument, use = _ARGUMENTS.get(chosen["call"], ("", ""))
    in_block = chosen["in_block"]
    lines = [f"\nclass {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += _indented(made, 8)
    lines += {
        "buffer": ['        self.register_buffer("mean", torch.zeros(6))'],
        "assigned_buffer": ['        self.register_buffer("mean", torch.zeros(6))'],
        "counter": ["        self.calls = 0"],
    }.get(in_block, [])
    if in_block == "checkpoint":
        lines += ["", "    def compute(self, x):", *_indented(computed, 8), "        return y"]
        computed = "y = checkpoint(self.compute, x, use_reentrant=False)"
    lines += ["", f"    def forward(self, x{argument and ', ' + argument}):"]
    lines += _indented(computed, 8) + _indented(_INSIDE.get(in_block, ""), 8) + _indented(use, 8)
    is_outside = chosen["call"] in ("gates", "residual_outside")
    return (
        "\n".join([*lines, *_indented("return y" if is_outside else _returned(chosen), 8)]) + "\n\n"
    )


_INSIDE = {
    "buffer": "if self.training:\n"
    "    self.mean.mul_(0.9).add_(0.1 * y.detach().mean((0, 1)))\n"
    "y = y - self.mean",
    "assigned_buffer": "if self.training:\n"
    "    self.mean = 0.9 * self.mean + 0.1 * y.detach().mean((0, 1))\n"
    "y = y - self.mean",
    "counter": "if self.training:\n    self.calls += 1",
    "in_place": "y = y.clone()\ny.mul_(0.5)",
    "layer_drop": "if self.training and torch.rand([]) < 0.3:\n    y = 0.0 * y",
    "no_grad_part": "with torch.no_grad():\n"
    "    size = y.abs().mean((1, 2), keepdim=True)\n"
    "y = y / (1 + size)",
}


def _returned(chosen):
    return _RETURNS[chosen["returns"]]


def init_lines(chosen):
    """Return the lines that make the module's parts, in ``__init__`` or ``configure_model``."""
    tokens = chosen["input"].startswith("tokens")
    lines = ["self.enter = " + ("nn.Embedding(12, 6)" if tokens else "nn.Linear(6, 6)")]
    if chosen["model"] == "gpt2":
        lines = [f"self.gpt2 = gpt2({chosen['num_blocks']})", "self.enter = self.gpt2.wte"]
    lines += {
        "parameter": ["self.position = nn.Parameter(0.1 * torch.randn(4, 6))"],
        "buffer": ['self.register_buffer("position", torch.linspace(0, 1, 24).view(4, 6))'],
        "shared_module": ["self.position = nn.LayerNorm(6)"],
    }.get(chosen["position"], [])
    if chosen["model"] == "own":
        lines += _container_lines(chosen)
    lines += {
        "gates": [f"self.gates = nn.Parameter(torch.rand({chosen['num_blocks']}))"],
        "bias": ["self.to_bias = nn.Linear(6, 6)"],
    }.get(chosen["call"], [])
    if chosen["head"] in ("norm_linear", "batchnorm"):
        kind = "LayerNorm" if chosen["head"] == "norm_linear" else "BatchNorm1d"
        lines += [f"self.last_norm = nn.{kind}(6)"]
    if chosen["input"] != "tokens_tied":
        lines += ["self.head = nn.Linear(6, 12)"]
    if chosen["head"] == "two_heads":
        lines += ["self.second_head = nn.Linear(6, 1)"]
    if chosen["unused"]:
        lines += ["self.unused = nn.Linear(6, 6)"]
    if chosen["empty"]:
        lines += ["self.empty = nn.Parameter(torch.zeros(0))"]
    return lines


def _container_lines(chosen):
    count = chosen["num_blocks"]
    names = [
        "OtherBlock()" if i % 2 and chosen["second_block"] else "Block()" for i in range(count)
    ]
    listed = ", ".join(names)
    if chosen["container"] == "attributes":
        return [f"self.layer{i} = {name}" for i, name in enumerate(names)]
    if chosen["container"] == "two_lists":
        half = (count + 1) // 2
        return [
            f"self.encoder = nn.ModuleList([{', '.join(names[:half])}])",
            f"self.decoder = nn.ModuleList([{', '.join(names[half:])}])",
        ]
    if chosen["container"] == "dict":
        entries = ", ".join(f'"block{i}": {name}' for i, name in enumerate(names))
        return [f"self.blocks = nn.ModuleDict({{{entries}}})"]
    if chosen["container"] == "sequential":
        return [f"self.blocks = nn.Sequential({listed})"]
    return [f"self.blocks = nn.ModuleList([{listed}])"]


def all_blocks(chosen):
    """Return the expression of all blocks in order."""
    if chosen["model"] == "gpt2":
        return "self.gpt2.h"
    if chosen["container"] == "attributes":
        return "[" + ", ".join(f"self.layer{i}" for i in range(chosen["num_blocks"])) + "]"
    if chosen["container"] == "two_lists":
        return "[*self.encoder, *self.decoder]"
    return "self.blocks.values()" if chosen["container"] == "dict" else "self.blocks"


def forward_lines(chosen):
    """Return the body of ``forward(self, x, mask)``: logits of each place, pooled ones, extra."""
    lines = ["h = self.enter(x)"]
    if chosen["model"] == "gpt2":
        called = "self.gpt2(input_ids=x, attention_mask=mask.long(), use_cache=False)"
        lines = [f"h = {called}.last_hidden_state"]
    lines += {
        "parameter": ["h = h + self.position"],
        "buffer": ["h = h + self.position"],
        "shared_module": ["h = self.position(h)"],
    }.get(chosen["position"], [])
    lines += ["extra = 0.0"]
    if chosen["model"] == "own":
        lines += [*_CALL_BEFORE.get(chosen["call"], []), *_loop(chosen)]
    lines += {
        "collect": ["h = torch.stack(states).mean(0)"],
        "fills_list": ["extra = extra + torch.stack(states).mean(0)"],
        "reads_list": ["extra = extra + states[-1]"],
        "fills_cache": ["extra = extra + cache.states[-1].pow(2).mean((1, 2))"],
    }.get(chosen["call"], [])
    if chosen["position"] == "shared_module":
        lines += ["h = self.position(h)"]
    if chosen["head"] == "norm_linear":
        lines += ["h = self.last_norm(h)"]
    lines += [
        "filled = mask.to(h.dtype)[..., None]",
        "pooled = (h * filled).sum(1) / filled.sum(1)",
    ]
    if chosen["head"] == "batchnorm":
        lines += ["pooled = self.last_norm(pooled)"]
    if chosen["head"] == "two_heads":
        lines += ["extra = extra + self.second_head(pooled).squeeze(-1).pow(2)"]
    tied = chosen["input"] == "tokens_tied"
    head = "functional.linear({}, self.enter.weight)" if tied else "self.head({})"
    return [*lines, f"return {head.format('h')}, {head.format('pooled')}, extra"]


_CALL_BEFORE = {
    "bias": ["bias = self.to_bias(h)"],
    "scale_from_batch": ["scale = 0.5 + mask.to(h.dtype).mean(1)[:, None, None]"],
    "skips": ["kept = []"],
    "collect": ["states = [h]"],
    "fills_list": ["states = []"],
    "reads_list": ["states = []"],
    "fills_cache": ["cache = Cache()"],
}
_ARGUMENT = {
    "mask": ", mask",
    "mask_by_name": ", mask=mask",
    "bias": ", bias",
    "fills_list": ", states",
    "reads_list": ", states",
    "fills_cache": ", cache",
}


def _loop(chosen):
    if chosen["container"] == "sequential":
        return ["h = self.blocks(h)"]
    call = chosen["call"]
    called = f"block(h{_ARGUMENT.get(call, '')})"
    if call == "checkpoint":
        called = "checkpoint(block, h, use_reentrant=False)"
    half = chosen["num_blocks"] // 2
    body = {
        "skips": [
            f"if index < {half}:",
            "    kept.append(h)",
            "elif kept:",
            "    h = h + 0.5 * kept.pop()",
        ],
    }.get(call, [])
    body = body + _taken(chosen, called)
    if call == "scale_from_batch":
        body += ["h = h * scale"]
    if call == "collect":
        body += ["states.append(h)"]
    return [
        f"for index, block in enumerate({all_blocks(chosen)}):",
        *(f"    {line}" for line in body),
    ]


def _taken(chosen, called):
    if chosen["call"] == "gates":
        return [f"h = h + self.gates[index] * {called}"]
    if chosen["call"] == "residual_outside":
        return [f"h = h + {called}"]
    adds = ["extra = extra + {}"] if chosen["loss"] == "auxiliary" else []
    if chosen["returns"] == "tensor":
        return [f"h = {called}"]
    if chosen["returns"].startswith("tuple"):
        return [f"h, more = {called}", *(line.format("more") for line in adds)]
    hidden, extra = (
        ('out["hidden"]', 'out["extra"]')
        if chosen["returns"] == "dict"
        else ("out.hidden", "out.extra")
    )
    return [f"out = {called}", f"h = {hidden}", *(line.format(extra) for line in adds)]


def _indented(text, width):
    return indent(text, " " * width).splitlines() if text else []
