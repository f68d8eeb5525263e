"""Private names of torch and Lightning: each that the package uses is listed here, and exists."""

import ast
import copyreg
import importlib
import inspect
import os
import sys
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.loops import evaluation_loop, fit_loop, prediction_loop
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES
from torch import nn
from torch.distributed._checkpointable import _Checkpointable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from torch.nn.attention.bias import CausalBias
from torchmetrics import MeanMetric
from transformers import PreTrainedModel

from lightning_pipeoffload.runtime.cut import is_in_autograd_function
from lightning_pipeoffload.runtime.step import checkpoint_replay
from lightning_pipeoffload.schedule import Action
from tests.support.package_source import PACKAGE, imported_in, root_of

TRAINER = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
OPTIMIZER = torch.optim.SGD([torch.ones(1)])


def sharded_linear():
    """Return a module that FSDP2 has sharded, in a group of one process, and gathered once."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = fully_shard(nn.Linear(2, 2), mesh=DeviceMesh("cpu", [0]))
        module.unshard()
        return module
    finally:
        dist.destroy_process_group()


SHARDED = sharded_linear()


def with_hyperparameters():
    module = LightningModule()
    module.save_hyperparameters({"lr": 1.0})
    return module


# module: names of it
IMPORTED = {
    "torch.utils._pytree": (
        "KeyPath TreeSpec keystr register_pytree_node tree_flatten tree_flatten_with_path "
        "tree_iter tree_leaves tree_map tree_map_with_path tree_unflatten"
    ),
    "torch.distributed": "_functional_collectives",
    "torch._C._distributed_c10d": "_resolve_process_group",
    "torch.testing._internal.distributed.fake_pg": "FakeStore",
    "torch.distributed.checkpoint._nested_dict": "unflatten_state_dict",
    "torch.autograd.graph": "_engine_run_backward",
    "torch.nn.modules.module": "_global_forward_hooks _global_forward_pre_hooks",
    "torch.optim.optimizer": "_global_optimizer_post_hooks _global_optimizer_pre_hooks",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives": (
        "DefaultAllGather DefaultReduceScatter"
    ),
    "torch.utils.data._utils.pin_memory": "pin_memory",
    "torch.overrides": "_get_current_function_mode _pop_mode _push_mode",
    "torch.utils._python_dispatch": "TorchDispatchMode _disable_current_modes",
    "torch._dynamo.eval_frame": "OptimizedModule",
    "torch._dynamo.exc": "RestartAnalysis SkipFrame TorchDynamoException",
    "torch._dynamo": "trace_rules",
    "torch._guards": "TracingContext detect_fake_mode",
    "lightning.fabric.strategies.launchers.subprocess_script": "_ChildProcessObserver",
    "lightning.fabric.utilities.init": "_materialize_distributed_module",
    "lightning.fabric.utilities.optimizer": "_optimizers_to_device",
    "lightning.fabric.utilities.distributed": (
        "_get_default_process_group_backend_for_device _init_dist_connection _sync_ddp_if_available"
    ),
    "lightning.pytorch.core.optimizer": "_init_optimizers_and_lr_schedulers",
    "lightning.pytorch.plugins.io.wrapper": "_WrappingCheckpointIO",
    "lightning.pytorch.loops.optimization.automatic": "_AutomaticOptimization",
    "lightning.pytorch.loops.fetchers": "_DataFetcher",
    "lightning.pytorch.overrides.distributed": "_IndexBatchSamplerWrapper",
    "lightning.pytorch.utilities.combined_loader": "_ModeIterator",
    "lightning.fabric.utilities.types": "_Stateful",
    "lightning.fabric.utilities.data": "_set_sampler_epoch",
    "lightning.pytorch.strategies.launchers.subprocess_script": "_SubprocessScriptLauncher",
    "lightning.pytorch.trainer.call": "_call_and_handle_interrupt",
    "lightning.pytorch.utilities.exceptions": "_TunerExitException",
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector": "_LoggerConnector",
}
# The names that Lightning uses to decide whether to validate; the fit sets the attributes.
CHECK = type(TRAINER.fit_loop.epoch_loop)._should_check_val_fx
DECIDING = SimpleNamespace(**dict.fromkeys(CHECK.__code__.co_names))
# an object, attributes that it has; torch.compile's default backend would import inductor
OWNERS = [
    (
        torch,
        "_C _ops _grouped_mm _foreach_copy_ _amp_update_scale_ _foreach_norm _TorchCompileWrapper "
        "_TorchCompileInductorWrapper",
    ),
    (ModelCheckpoint(), "_train_time_interval"),
    (
        TRAINER,
        "_val_check_time_interval _logger_connector _accelerator_connector _signal_connector "
        "_results _data_connector",
    ),
    (DECIDING, "_last_val_time"),
    (
        torch._C,
        "_disabled_torch_function_impl _InferenceMode _set_throw_on_mutable_data_ptr "
        "_AutoDispatchBelowADInplaceOrView _ExcludeDispatchKeyGuard _IncludeDispatchKeyGuard "
        "_are_functorch_transforms_active _will_engine_execute_node DisableTorchFunction "
        "_autograd _nn _accelerator_setAllocatorSettings",
    ),
    (
        torch._C._autograd,
        "_unsafe_set_version_counter _top_saved_tensors_default_hooks _get_sequence_nr "
        "_get_current_graph_task_keep_graph _profiler_enabled _enable_record_function",
    ),
    (torch.nn.init, "_no_grad_trunc_normal_ _calculate_fan_in_and_fan_out"),
    (torch, "_VF"),
    (torch._VF, "_pad_packed_sequence"),
    (sys, "_getframe"),
    (torch.Tensor, "_make_wrapper_subclass _make_subclass"),
    (torch.ones(1), "_version _neg_view _backward_hooks _post_accumulate_grad_hooks"),
    ((torch.ones(1, requires_grad=True) * 2).grad_fn, "_sequence_nr"),
    (torch.ones(1).untyped_storage(), "_cdata"),
    (torch.nn.modules.module, "_global_backward_hooks"),
    (
        nn.Module(),
        "_forward_hooks _forward_hooks_with_kwargs _forward_pre_hooks _backward_pre_hooks "
        "_parameters _buffers "
        "_non_persistent_buffers_set _compiled_call_impl _call_impl _modules",
    ),
    (torch.utils.checkpoint.CheckpointFunction._backward_cls, "_forward_cls"),
    (torch.cuda, "_sleep"),
    (dist.distributed_c10d, "_abort_process_group _world"),
    (torch.ops.aten, "_local_scalar_dense _to_copy _unique2 _unsafe_view _ctc_loss"),
    (torch.amp.GradScaler("cpu"), "_scale _growth_tracker _unscale_grads_"),
    (torch.ops.aten.add.Tensor, "_schema _dispatch_cache"),
    (CausalBias, "_dispatch"),
    (torch.library.Library, "_destroy"),
    (nn.Module().state_dict(), "_metadata"),
    (
        PreTrainedModel,
        "_keys_to_ignore_on_load_missing _keys_to_ignore_on_load_unexpected _tp_plan",
    ),
    (torch._C._distributed_c10d.Backend.Options, "_timeout"),  # of NCCL's options too
    (ModelParallelStrategy(), "_save_distributed_checkpoint _device_mesh"),
    (copyreg, "_reconstructor"),
    (Action, "_replace _fields _asdict"),
    (CombinedLoader([]), "_iterator _mode _spec"),
    (_DataFetcher(), "_start_profiler _stop_profiler"),
    (TRAINER._accelerator_connector, "_layer_sync"),
    (TRAINER._signal_connector, "_slurm_sigusr_handler_fn"),
    (
        TRAINER._logger_connector,
        "_callback_metrics _logged_metrics _progress_bar_metrics _first_loop_iter",
    ),
    (torch.utils.checkpoint, checkpoint_replay.GENERATOR),
    (MeanMetric(), "_forward_cache _computed _update_count _to_sync"),
    (LightningModule(), "_current_fx_name"),
    (with_hyperparameters(), "_hparams_initial"),
    (_ChildProcessObserver(os.getpid(), []), "_child_processes"),
    (os, "_exit"),
    (OPTIMIZER, "_optimizer_step_pre_hooks _optimizer_step_post_hooks"),
    (TRAINER.strategy, "_checkpoint_io"),
    (ThroughputMonitor(len), "_throughputs"),
    (ModelParallelStrategy, "_setup_distributed"),
    (DTensor, "_local_tensor"),
    (Shard, "_make_shard_tensor"),
    (ColwiseParallel, "_apply"),
    (Replicate, "_make_replicate_tensor"),
    (torch.distributed._functional_collectives, "_maybe_wrap_tensor"),
    (
        torch.distributed.tensor.debug,
        "_clear_python_sharding_prop_cache _clear_fast_path_sharding_prop_cache",
    ),
    (SHARDED, "_get_fsdp_state"),
    (SHARDED._get_fsdp_state(), "_fsdp_param_group"),
    (
        SHARDED._get_fsdp_state()._fsdp_param_group.fsdp_params[0],
        "_module_info _unsharded_param mp_policy sharded_param padded_sharded_param_size",
    ),
    (SHARDED._get_fsdp_state()._fsdp_param_group, "fsdp_params"),
]
USED = {name: owner for owner, names in OWNERS for name in names.split()}
READ_BY_TORCH = {"_is_param"}  # tested below


def test_what_torch_shares_says_where_it_is_and_whether_to_wait():
    names = inspect.signature(rebuild_cuda_tensor).parameters
    assert {"storage_device", "event_sync_required"} <= names.keys()


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


@cache
def files():
    return [[*ast.walk(ast.parse(path.read_text()))] for path in PACKAGE.rglob("*.py")]


def nodes():
    return [node for file in files() for node in file]


def defined_in(file):
    """Names that the nodes of a file define, or assign as attributes of their own objects."""
    names = set()
    for node in file:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if is_own_object(node.value):
                names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def is_own_object(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


# A name of theirs may be the package's own too.
OFTEN_USED = torch, torch.Tensor, nn.Module(), dist.distributed_c10d, OPTIMIZER, TRAINER
BY_NAME = ("getattr", "setattr", "hasattr", "delattr")


def private_uses():
    """Private attributes of libraries' objects, and of own ones that another file defines."""
    everywhere = defined_in(nodes())
    for file in files():
        here, imported = defined_in(file), imported_in(file)
        for node in file:
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                is_own = is_own_object(node.value)
                is_defined = node.attr in (everywhere if is_own else here)
                is_theirs = not is_own and any(hasattr(each, node.attr) for each in OFTEN_USED)
                if is_theirs or not is_defined or root_of(node.value) in imported:
                    yield node.attr
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in BY_NAME:
                name = getattr(node.args[1], "value", "")
                if isinstance(name, str) and is_private(name) and name not in here:
                    yield name


def test_every_private_attribute_that_is_used_is_listed():
    assert {*private_uses()} <= USED.keys() | READ_BY_TORCH


def test_nothing_is_listed_that_nobody_uses():
    texts = {node.value for node in nodes() if isinstance(node, ast.Constant)}
    names = {node.attr for node in nodes() if isinstance(node, ast.Attribute)} | texts
    private = {name for name in USED if is_private(name)}
    assert not private - names - {checkpoint_replay.GENERATOR}


def test_a_tensor_that_says_that_it_is_a_parameter_is_one():
    tensor = torch.ones(1)
    tensor._is_param = True
    assert isinstance(tensor, nn.Parameter)


def test_every_private_import_is_listed():
    found = set()
    for node in nodes():
        if isinstance(node, ast.ImportFrom) and node.module:
            private = any(map(is_private, node.module.split(".")))
            found |= {
                (node.module, alias.name)
                for alias in node.names
                if (private or is_private(alias.name))
                and node.module.split(".")[0] in ("torch", "lightning")
            }
    listed = {(module, name) for module, names in IMPORTED.items() for name in names.split()}
    assert found == listed


def test_imports_exist():
    listed = [(module, name) for module, names in IMPORTED.items() for name in names.split()]
    assert not [use for use in listed if not hasattr(importlib.import_module(use[0]), use[1])]


def test_attributes_exist():
    assert not [name for name, owner in USED.items() if not hasattr(owner, name)]


EPOCH_LOOP = TRAINER.fit_loop.epoch_loop
REPLACED = [
    (TRAINER.fit_loop, "run", []),
    (TRAINER.fit_loop, "on_advance_start", []),
    (TRAINER.fit_loop, "on_advance_end", []),
    (
        TRAINER.fit_loop.epoch_loop,
        "update_lr_schedulers",
        ["interval", "update_plateau_schedulers"],
    ),
    (EPOCH_LOOP, "_should_check_val_fx", ["data_fetcher"]),
    (EPOCH_LOOP, "_broadcast_sigterm_tensor", []),
    (EPOCH_LOOP.val_loop, "run", ["args", "kwargs"]),
    (TRAINER.validate_loop, "run", ["args", "kwargs"]),
    (TRAINER.test_loop, "run", ["args", "kwargs"]),
    (TRAINER.predict_loop, "run", ["args", "kwargs"]),
    (TRAINER.predict_loop, "on_run_end", []),
    (TRAINER._logger_connector, "on_batch_end", []),
    (TRAINER._logger_connector, "epoch_end_reached", []),
    (TRAINER._logger_connector, "reset_results", []),
    (TRAINER._data_connector, "_requires_distributed_sampler", ["dataloader"]),
    (TRAINER._signal_connector, "_sigterm_notifier_fn", ["signum", "_"]),
    (TRAINER._signal_connector, "_slurm_sigusr_handler_fn", ["signum", "_"]),
    (TRAINER.precision_plugin, "clip_grad_by_norm", ["optimizer", "clip_val"]),
    (TRAINER.precision_plugin, "clip_grad_by_value", ["optimizer", "clip_val"]),
    (
        torch.amp.GradScaler("cpu"),
        "_unscale_grads_",
        ["optimizer", "inv_scale", "found_inf", "allow_fp16"],
    ),
]


@pytest.mark.parametrize(("owner", "name", "arguments"), REPLACED)
def test_what_a_pipeline_puts_its_own_in_place_of_takes_these_arguments(owner, name, arguments):
    assert name not in vars(owner)
    assert [*inspect.signature(getattr(owner, name)).parameters] == arguments


def test_every_method_that_is_replaced_is_listed():
    patches = ast.parse((PACKAGE / "loop" / "lightning_patches.py").read_text())
    calls = [node for node in ast.walk(patches) if isinstance(node, ast.Call)]
    replacing = [c for c in calls if getattr(c.func, "id", "") in ("replace", "_patch_method")]
    found = {each.value for c in replacing for each in c.args if isinstance(each, ast.Constant)}
    assert found <= {name for _, name, _ in REPLACED}
    assert len(found) == 12


def test_torchs_checkpoint_has_the_result_in_a_variable_when_its_generator_goes_on():
    source = inspect.getsource(torch.utils.checkpoint)
    assert f"        gen = {checkpoint_replay.GENERATOR}(" in source
    assert " ret = function(*args, **kwargs)" in source
    assert "            next(gen)\n        except StopIteration:\n            return ret" in source


def test_a_frame_shows_the_forward_of_an_autograd_function():
    found = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(x):
            found.append(is_in_autograd_function())
            return x

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

    Noting.apply(torch.ones(1))
    assert (found, is_in_autograd_function()) == ([True], False)


def test_names_that_are_looked_for_are_there():
    loop = TRAINER.fit_loop.epoch_loop.automatic_optimization
    assert callable(loop._make_backward_fn)
    assert callable(loop._make_zero_grad_fn)
    assert callable(_SubprocessScriptLauncher._call_children_scripts)
    assert {"__create_write_items__", "__get_tensor_shard__"} <= {*vars(_Checkpointable)}
    assert {"_init_backend", "_rank"} <= inspect.signature(DeviceMesh).parameters.keys()
    assert {"_apply", "_load_from_state_dict"} <= {*vars(nn.Module)}
    assert "__deepcopy__" in vars(nn.Parameter)
    assert "_reset_parameters" in vars(nn.MultiheadAttention)
    for what in ("callback_hooks", "lightning_module_hook", "strategy_hook"):
        assert "hook_name" in inspect.signature(getattr(call, f"_call_{what}")).parameters
    parameter = nn.Parameter(torch.ones(1))
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert len(parameter._post_accumulate_grad_hooks) == 1


@pytest.mark.parametrize("name", ["linear", "mm", "addmm", "convolution"])
def test_the_dispatcher_has_autograd_kernels_to_replace(name):
    assert torch.library.get_kernel(f"aten::{name}", "AutogradCPU") is not None


@pytest.mark.parametrize("key", ["AutogradCPU", "AutogradCUDA", "AutogradOther"])
def test_dispatch_keys_have_names_and_make_sets(key):
    assert torch._C.DispatchKeySet(torch._C.DispatchKey.__members__[key])


def test_lightning_makes_numbers_for_a_progress_bar_where_it_is_kept_from_it():
    assert callable(result.convert_tensors_to_scalars)
    assert "convert_tensors_to_scalars" in result._ResultCollection.metrics.__code__.co_names


def test_what_a_hook_on_registration_returns_is_registered():
    replaced = nn.Parameter(torch.ones(1))
    register = nn.modules.module.register_module_parameter_registration_hook
    handle = register(lambda module, name, parameter: replaced)
    module = nn.Module()
    try:
        module.weight = nn.Parameter(torch.ones(2))
    finally:
        handle.remove()
    assert module.weight is replaced


# Functions of Lightning that its loops call by names of their own modules, with the arguments.
OF_LOOPS = {
    "has_len_all_ranks": [
        "dataloader",
        "strategy",
        "allow_zero_length_dataloader_with_multiple_devices",
    ],
    "_parse_num_batches": ["stage", "length", "limit_batches"],
    "_select_data_fetcher": ["trainer", "stage"],
}


@pytest.mark.parametrize("loop", [evaluation_loop, fit_loop, prediction_loop])
@pytest.mark.parametrize("name", OF_LOOPS)
def test_loops_ask_for_lengths_and_fetchers_by_these_names(loop, name):
    assert [*inspect.signature(getattr(loop, name)).parameters] == OF_LOOPS[name]
    assert f"{name}(" in inspect.getsource(loop).partition("class ")[2]


@pytest.mark.parametrize("mode", _SUPPORTED_MODES)
def test_a_batch_of_several_loaders_has_one_of_each(mode):
    combined = CombinedLoader({"a": range(2), "b": [range(3), range(1)]}, mode)
    batch, number, loader = next(iter(combined))
    assert (number, loader, combined._mode) == (0, 0, mode)
    assert batch == 0 if mode == "sequential" else combined._spec.flatten_up_to(batch) == [0, 0, 0]
