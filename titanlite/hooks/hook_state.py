"""Collect the state of all hooks for a checkpoint, keyed by hook name, and restore it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from titanlite.checkpoint.manifest import OLD_HOOK_NAMES
from titanlite.config.errors import UserError
from titanlite.hooks.hook import Hook


def keeps_state(hook: Hook) -> bool:
    """Return whether a hook has state to store in checkpoints.

    A hook has state if its class overrides `state_dict` or `tensors`.
    """
    hook_class = hook.__class__
    return hook_class.state_dict is not Hook.state_dict or hook_class.tensors is not Hook.tensors


def check_hook_names(hooks: Sequence[Hook]) -> None:
    """Check that each hook with state has a unique name, under which checkpoints store its state.

    Raises:
        UserError: If a hook with state has no name, a name with a dot, or the same name as another
            hook.
    """
    names = set[str]()
    for hook in hooks:
        if not keeps_state(hook):
            continue

        problem = ""
        if not hook.name:
            problem = "has no name"
        elif "." in hook.name:
            problem = f"has a dot in its name {hook.name!r}"
        elif hook.name in names:
            problem = f"has the same name as another hook, {hook.name!r}"
        if problem:
            raise UserError(
                f"The hook {type(hook).__name__} {problem}, but checkpoints store its state under "
                'its name. Set a unique `name` without dots in its class, such as name = "my_hook".'
            )
        names.add(hook.name)


def check_json(hook: Hook, method: str, value: Any) -> None:
    """Check that JSON can represent the value that a method of a hook returned.

    NaN and infinity are accepted.

    Raises:
        UserError: If the value contains itself or a type that JSON lacks, such as a tensor.
    """
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"The hook {hook.name or type(hook).__name__} returns a value from `{method}` that "
            f"JSON cannot represent: {error}. Return only numbers, strings, booleans, None, lists "
            "and dictionaries. To convert a tensor or a NumPy value, call `.tolist()`."
        ) from error


def hook_states(hooks: Sequence[Hook]) -> dict[str, Any]:
    """Return the `state_dict` of each hook that has state, keyed by hook name.

    Checkpoints store the result, and `load_hook_states` restores it.

    Raises:
        UserError: If a state is not a JSON value.
    """
    states = {}
    for hook in hooks:
        if keeps_state(hook):
            state = hook.state_dict()
            check_json(hook, "state_dict", state)
            states[hook.name] = state
    return states


def load_hook_states(hooks: Sequence[Hook], states: Mapping[str, Any]) -> None:
    """Restore the state of hooks from a checkpoint. Leave hooks without saved state unchanged.

    Args:
        hooks: Hooks of this run.
        states: Saved `state_dict` of each hook, by hook name.
    """
    for hook in hooks:
        state = states.get(hook.name)
        if state:
            hook.load_state_dict(state)


def hook_tensors(hooks: Sequence[Hook]) -> dict[str, Tensor]:
    """Return the tensors of all hooks for a checkpoint, such as averaged weights.

    Returns:
        The tensors, keyed by "<hook name>.<tensor name>".
    """
    tensors = {}
    for hook in hooks:
        for name, tensor in hook.tensors().items():
            tensors[f"{hook.name}.{name}"] = tensor
    return tensors


def prepare_hooks_for_loading(
    hooks: Sequence[Hook],
    warn: Callable[[str], None],
    sizes: Mapping[str, torch.Size],
    states: Mapping[str, Any],
) -> None:
    """Resize hook tensors to their sizes in a checkpoint, so that they can be loaded.

    Also warn about hooks whose state exists only in the checkpoint or only in this run.

    Args:
        hooks: Hooks of this run.
        warn: Function that logs a warning.
        sizes: Size of each saved tensor, by "<hook name>.<tensor name>".
        states: Saved `state_dict` of each hook, by hook name.
    """
    sizes_by_hook = _group_by_hook(sizes)
    for hook in hooks:
        hook.resize_tensors(sizes_by_hook.get(hook.name, {}))

    _warn_of_differences(hooks, warn, set(sizes_by_hook), states)


def _warn_of_differences(
    hooks: Sequence[Hook],
    warn: Callable[[str], None],
    names_with_tensors: set[str],
    states: Mapping[str, Any],
) -> None:
    """Warn about hooks whose state exists only in a checkpoint or only in this run.

    Args:
        hooks: Hooks of this run.
        warn: Function that logs a warning.
        names_with_tensors: Names of the hooks with saved tensors.
        states: Saved `state_dict` of each hook, by hook name.
    """
    # Warn about saved state that no hook loads. Ignoring an empty state loses nothing.
    names_with_state = {name for name, state in states.items() if state}
    hook_names = {hook.name for hook in hooks}
    ignored = (names_with_tensors | names_with_state) - hook_names
    if ignored:
        names = ", ".join(sorted(ignored))
        warn(f"Ignoring the saved state of hooks that this run does not have: {names}")

    # Warn about hooks without saved state. Here, an empty state counts as saved.
    expected_names = {hook.name for hook in hooks if _is_always_saved(hook)}
    saved_names = names_with_tensors.union(states)
    missing = expected_names - saved_names
    if missing:
        names = ", ".join(sorted(missing))
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


def _is_always_saved(hook: Hook) -> bool:
    """Return whether every checkpoint of a run with this hook contains its state or tensors.

    This does not hold for hooks without state. It also does not hold for built-in hooks without
    tensors, because titanlite 0.2 and earlier did not save their state if it was empty.
    """
    is_built_in = hook.name in OLD_HOOK_NAMES.values()
    return bool(hook.tensors()) if is_built_in else keeps_state(hook)
