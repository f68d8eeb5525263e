"""What the package changes in its process, in objects that are neither its own nor the user's.

Each change is listed with how long it lasts, and why. "Attached": until no pipeline of the process
is, when ``Pipeline.detach`` closes ``PATCHES``.
"""

import ast

from tests.support.package_source import PACKAGE, imported_in, root_of

LISTED = {
    "checkpoints/saved_values.py": {
        "torch.serialization.register_package": "stays: for storages that this file makes",
    },
    "loop/data.py": {
        "warnings.filterwarnings": "a fit: if resumed it skips what it has read, as none else does",
    },
    "loop/hooks/hook_forwards.py": {
        "register_module_forward_pre_hook": "a run, outside of steps: calls in hooks are answered",
        "register_module_forward_hook": "as the former",
    },
    "loop/lightning_patches.py": {
        "BaseFinetuning.filter_on_optimizer": "a fit: parameters without values do not compare",
    },
    "loop/reading.py": {
        "module": "an entry: lengths and fetchers of Lightning's loops, one process of all reads",
    },
    "loop/model_in_parts.py": {
        "DeviceMesh.__getitem__": "a block: a notice of the dimension that has one rank",
        "warnings.filterwarnings": "a block: Lightning warns of how the module is made",
    },
    "loop/step_calls.py": {
        "builtins.print": "a stage's pass: the last stage of the rank prints",
    },
    "metrics/metric_calls.py": {
        "warnings.simplefilter": "a block: a metric of values that stand for a microbatch's own",
    },
    "metrics/shared_metrics.py": {
        "result.convert_tensors_to_scalars": "a block: values stay on the device",
    },
    "metrics/metric_values.py": {
        "Metric.sync": "until a run of any strategy: scripts compute metrics after a fit",
        "Strategy.setup_environment": "until a run of any strategy, by which it is noticed",
    },
    "runtime/measure/live_bytes.py": {
        "finalize(held, self._drop, key, size).atexit": "a measurement: of a tensor, none at exit",
    },
    "odc/sharding.py": {
        "register_fsdp_forward_method": "stays: of the user's module, which is sharded",
    },
    "processes/failure.py": {
        "sys.excepthook": "stays: one line in place of an error that another rank prints",
    },
    "processes/forking_launcher.py": {
        "signal.signal": "a forked rank; in the interpreter the user's own is put back",
        "sys.stdout": "a forked rank other than 0",
        "sys.stderr": "as the former",
    },
    "processes/joint_strategy.py": {
        "signal.signal": "the end of a process that Ctrl-C has interrupted",
    },
    "processes/launcher.py": {
        "sys.argv[0]": "a block: processes are started as this one was",
    },
    "processes/pipeline_processes.py": {
        "rank_zero_only.rank": "stays: Lightning's own strategies set it",
    },
    "runtime/cut/module_hooks.py": {
        "torchs.register_module_forward_pre_hook": "a trace: modules with backward hooks",
        "torchs.register_module_forward_hook": "as the former",
    },
    "runtime/cut/trial_cuts.py": {
        "torchs.register_module_forward_pre_hook": "a trace: the order of modules' calls",
        "torchs.register_module_forward_hook": "as the former",
    },
    "runtime/cut/writes.py": {
        "nn.Module.register_parameter": "a trace: a step replaces a parameter",
    },
    "runtime/leaves.py": {
        "register_pytree_node": "stays: for a class of this file",
    },
    "runtime/making/registered_parameters.py": {
        "Tensor._make_subclass": "a module's construction: parameters become shapes",
        "register_module_parameter_registration_hook": "as the former",
    },
    "runtime/shapes/packed_sequences.py": {
        "torch._VF._pad_packed_sequence": "attached: sequences without values are padded",
    },
    "runtime/shapes/remote_tensor.py": {
        "init._no_grad_trunc_normal_": "attached: draws for tensors without values",
    },
    "runtime/shapes/shard_origins.py": {
        "DTensor.from_local": "a trace: which values are of a shard",
        "DTensor.to_local": "as the former",
    },
    "runtime/step/read_cache.py": {
        "Tensor": "attached: reads of another stage's values are answered",
    },
    "runtime/step/checkpoint_replay.py": {
        "torchs": "attached: blocks that are recomputed get what F saw",
        "torchs.CheckpointFunction.forward": "as the former",
    },
    "runtime/tensor_parallel/collectives.py": {
        "functional._maybe_wrap_tensor": "attached: collectives are waited for where called",
        "torch.library.Library": "attached: collectives over gloo go by way of the host",
    },
    "runtime/tensor_parallel/layers.py": {
        "register_module_parameter_registration_hook": "configure_model: finds parted weights",
    },
    "runtime/tensor_parallel/own_parts.py": {
        "Shard._make_shard_tensor": "a module's construction: tensor ranks divide their own values",
        "Replicate._make_replicate_tensor": "as the former",
    },
    "runtime/tensor_parallel/shard_initialization.py": {
        "Tensor": "attached, and configure_model: draws into shards are parts of whole ones",
        "init": "as the former",
    },
    "runtime/users_code/attributes.py": {
        "nn.Module.__setattr__": "a trace: a step writes an attribute",
    },
    "runtime/weight_grad/kernels.py": {
        "torch.library.Library": "attached: weight gradients wait for W",
    },
    "strategy_names.py": {
        "StrategyRegistry.available_strategies": "stays: a name like ours is refused with ours",
    },
}
# Not looked at: registries that exist for packages to use, random numbers, and the environment of
# processes that are started.
_CHANGING = {"setLevel", "filterwarnings", "simplefilter", "addHandler", "signal", "Library"}
_REGISTRIES = ("register_", "set_start_method")
_REPLACING = {"replaced", "setattr", "delattr"}
_APART = {"cli", "plan.py", "train.py", "lightning_names.py", "__init__.py"}


def stored(node):
    """Attributes and entries that a statement stores."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        for target in targets:
            for part in ast.walk(target):
                is_stored = isinstance(getattr(part, "ctx", None), ast.Store)
                if is_stored and isinstance(part, (ast.Attribute, ast.Subscript)):
                    yield part


def replaced_in(nodes, imported):
    """Yield the attributes of what is imported that calls of ``replaced`` or ``setattr`` name."""
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _REPLACING:
            owner, name, *_ = node.args
            if root_of(owner) in imported:
                is_known = isinstance(name, ast.Constant)
                yield f"{ast.unparse(owner)}.{name.value}" if is_known else ast.unparse(owner)


def changes_in(nodes):
    """Yield what the code of a file changes in what it has imported."""
    imported = imported_in(nodes)
    yield from replaced_in(nodes, imported)
    for node in nodes:
        for part in stored(node):
            base = part.value if isinstance(part, ast.Subscript) else part
            if root_of(base) in imported:
                yield ast.unparse(part)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            last = name.rpartition(".")[2]
            if root_of(node.func) in imported and (
                last in _CHANGING or last.startswith(_REGISTRIES)
            ):
                yield name


def test_every_change_of_the_process_is_listed():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        changes = {*changes_in([*ast.walk(ast.parse(path.read_text()))])}
        changes = {each for each in changes if not each.startswith("os.environ")}
        if changes and not {name, name.partition("/")[0]} & _APART:
            found[name] = changes
    assert found == {name: {*changes} for name, changes in LISTED.items()}


def sets(path):
    """Attributes of imported modules and classes that a file sets."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    imported = imported_in(nodes)
    parts = (part for node in nodes for part in stored(node) if isinstance(part, ast.Attribute))
    kept = (
        part for part in parts if not isinstance(part.value, ast.Call)
    )  # of an object made here
    stores = {ast.unparse(part) for part in kept if root_of(part.value) in imported}
    return stores | {*replaced_in(nodes, imported)}


def test_contributing_names_every_file_that_sets_an_attribute_of_another_package():
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    listed = text.partition("## What is replaced in the process")[2].partition("\n## ")[0]
    setting = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if sets(path)}
    assert not [path for path in setting if f"`{path}`" not in listed]
    assert len(setting) > 8
