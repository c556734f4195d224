"""Collect the state of all hooks for a checkpoint, and restore it under the name of each hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from titanlite.checkpoint.manifest import OLD_HOOK_NAMES
from titanlite.config.errors import UserError
from titanlite.hooks.hook import Hook


def keeps_state(hook: Hook) -> bool:
    """Return whether a hook has state to store in checkpoints.

    This is the case if its class overrides `state_dict` or `tensors`.
    """
    hook_class = hook.__class__
    return hook_class.state_dict is not Hook.state_dict or hook_class.tensors is not Hook.tensors


def check_hook_names(hooks: Sequence[Hook]) -> None:
    """Check that each hook with state has a unique name, under which checkpoints store the state.

    Raises:
        UserError: If a hook with state has no name, the name of another hook, or a name with a dot.
    """
    names = set[str]()
    for hook in hooks:
        if not keeps_state(hook):
            continue

        hook_class = type(hook).__name__
        if not hook.name:
            raise UserError(
                f"The hook {hook_class} keeps state, but has no name to save it under. "
                'Set `name` in its class, such as name = "my_hook".'
            )
        if "." in hook.name:
            raise UserError(
                f"The name {hook.name!r} of the hook {hook_class} has a dot. Remove it."
            )
        if hook.name in names:
            raise UserError(
                f"The hook {hook_class} has the same name as another hook, {hook.name!r}. "
                "Change `name`."
            )
        names.add(hook.name)


def hook_states(hooks: Sequence[Hook]) -> dict[str, Any]:
    """Return the `state_dict` of each hook that has state, keyed by the name of the hook.

    Checkpoints store the result, and `load_hook_states` restores it.
    """
    return {hook.name: hook.state_dict() for hook in hooks if keeps_state(hook)}


def load_hook_states(hooks: Sequence[Hook], states: Mapping[str, Any]) -> None:
    """Restore the states of hooks from a checkpoint. Hooks without a saved state stay unchanged.

    Args:
        hooks: Hooks of this run.
        states: Hook name -> saved `state_dict`.
    """
    for hook in hooks:
        state = states.get(hook.name)
        if state:
            hook.load_state_dict(state)


def hook_tensors(hooks: Sequence[Hook]) -> dict[str, Tensor]:
    """Return the tensors of all hooks for a checkpoint, such as the averages of weights.

    Returns:
        The tensors, keyed by "<hook name>.<tensor name>".
    """
    tensors = {}
    for hook in hooks:
        for name, tensor in hook.tensors().items():
            tensors[f"{hook.name}.{name}"] = tensor
    return tensors


def prepare_hooks(
    hooks: Sequence[Hook],
    warn: Callable[[str], None],
    sizes: Mapping[str, torch.Size],
    states: Mapping[str, Any],
) -> None:
    """Resize the tensors of hooks to the sizes in a checkpoint, before they are loaded.

    Warn about hooks whose state exists only in the checkpoint or only in this run.

    Args:
        hooks: Hooks of this run.
        warn: Function that logs a warning.
        sizes: "<hook name>.<tensor name>" -> size of the saved tensor.
        states: Hook name -> saved `state_dict`.
    """
    sizes_by_hook = _group_by_hook(sizes)
    for hook in hooks:
        hook.resize_tensors(sizes_by_hook.get(hook.name, {}))

    # Ignoring an empty `state_dict` is no loss.
    non_empty_states = {name for name, state in states.items() if state}
    ignored_hooks = {*sizes_by_hook, *non_empty_states} - {hook.name for hook in hooks}
    if ignored_hooks:
        names = ", ".join(sorted(ignored_hooks))
        warn(f"Ignoring the saved state of hooks that this run does not have: {names}")

    # An empty `state_dict` shows that the run that saved it had this hook, so it is not missing.
    missing_hooks = _always_saved_hooks(hooks) - {*sizes_by_hook, *states}
    if missing_hooks:
        names = ", ".join(sorted(missing_hooks))
        warn(f"The checkpoint has no state of these hooks, which start without it: {names}")


def _group_by_hook(sizes: Mapping[str, torch.Size]) -> dict[str, dict[str, torch.Size]]:
    """Group the sizes of saved tensors by hook.

    For example, {"ema.bias": size} becomes {"ema": {"bias": size}}.
    """
    sizes_by_hook: dict[str, dict[str, torch.Size]] = {}
    for key, size in sizes.items():
        hook_name, _, tensor_name = key.partition(".")
        sizes_by_hook.setdefault(hook_name, {})[tensor_name] = size
    return sizes_by_hook


def _always_saved_hooks(hooks: Sequence[Hook]) -> set[str]:
    """Return the names of the hooks that save state in every checkpoint.

    If a checkpoint lacks their state, the run that saved it did not have these hooks.
    """
    names = set()
    for hook in hooks:
        # titanlite 0.2 did not save the state of its own hooks while it was empty.
        may_be_absent = hook.name in OLD_HOOK_NAMES.values()
        if hook.tensors() or (keeps_state(hook) and not may_be_absent):
            names.add(hook.name)
    return names
