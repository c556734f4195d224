"""Read the JSON file of a resolved torchtitan 0.3 config.

The file contains the values of all options, but no class names.
"""

from __future__ import annotations

from typing import Any

from titanlite.config.errors import UserError

ADAMW_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
"""torch defaults of AdamW arguments that a parameter group omits."""


def read_config(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert a resolved torchtitan 0.3 config to the sections of a torchtitan job file.

    A resolved config is a JSON object with the values of all options.

    Returns:
        The sections, and the hyperparameters of the model by their names in `Architecture`.

    Raises:
        UserError: If the config is incomplete, or its model is not a dense Llama or Qwen3.
    """
    try:
        return _read_sections(config), _read_sizes(config["model_spec"]["model"])
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"this is not a torchtitan 0.3 config of a dense Llama or Qwen3 model: {error!r}."
        ) from None


def _read_sections(config: dict[str, Any]) -> dict[str, Any]:
    """Convert a resolved torchtitan config, except its model, to the sections of a job file."""
    spec = config["model_spec"]
    sections = dict(config)
    sections["model_spec"] = {"name": spec["name"], "flavor": spec["flavor"]}
    sections["optimizer"] = _read_optimizer(config["optimizer"])
    sections["activation_checkpoint"] = _read_checkpointing(config["activation_checkpoint"])
    del sections["loss"]  # always the cross entropy
    if not config["validator"]["enable"]:
        del sections["validator"]
    return sections


def _read_optimizer(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Convert the optimizer of a resolved torchtitan config to the section [optimizer] of a job.

    For example, "betas" = [0.9, 0.95] becomes "beta1" = 0.9 and "beta2" = 0.95.

    Args:
        optimizer: The optimizer in the config. The name and the arguments of the optimizer, such as
            the learning rate, are in its only parameter group. All other entries are kept.

    Raises:
        UserError: If the optimizer has several parameter groups.
        LookupError: If an entry is missing. `read_config` converts it to a UserError.
    """
    groups = optimizer["param_groups"]
    if len(groups) > 1:
        raise UserError("optimizer.param_groups: must be one group. Remove the others.")
    group = groups[0]

    # Replace the parameter group with its arguments, which override the torch defaults.
    arguments = ADAMW_DEFAULTS | group["optimizer_kwargs"]
    section = optimizer | arguments
    del section["param_groups"]

    beta1, beta2 = section.pop("betas")
    return {**section, "name": group["optimizer_name"], "beta1": beta1, "beta2": beta2}


def _read_checkpointing(policy: dict[str, Any] | None) -> dict[str, Any]:
    """Convert an activation checkpointing policy to the section [activation_checkpoint].

    Args:
        policy: The policy in a resolved torchtitan config, or None if it is disabled. It does not
            name its mode, but each mode has different keys.
    """
    if policy is None:
        return {"mode": "none", "selective_ac_option": "op"}

    mode = "full"
    if "memory_budget" in policy:
        mode = "memory_budget"
    elif "force_recompute_mm_shapes_by_fqns" in policy:
        mode = "selective"
    return {**policy, "mode": mode, "selective_ac_option": "op"}


def _read_sizes(model: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a torchtitan model by their names in `Architecture`."""
    block = model["layers"][0]
    attention = block["attention"]
    rope = attention["rope"]
    return {
        "dim": model["dim"],
        "n_layers": len(model["layers"]),
        "n_heads": attention["n_heads"],
        "n_kv_heads": attention["n_kv_heads"] or attention["n_heads"],
        "ffn_dim": block["feed_forward"]["w1"]["out_features"],
        "norm_eps": block["attention_norm"]["eps"],
        "rope_theta": rope["theta"],
        "rope_scaling_factor": rope["scaling_factor"] if rope["scaling"] == "llama" else 1.0,
        "tied_embeddings": model["enable_weight_tying"],
    }
