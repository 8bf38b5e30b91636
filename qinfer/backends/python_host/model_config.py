"""`pb_utils.ModelConfig`: what `auto_complete_config` is given to complete. Rules and texts are Triton's."""

import json
from collections.abc import Mapping
from typing import Any

_REQUIRED = ("name", "data_type", "dims")


class ModelConfig:
    """A model's configuration.

    Args:
        model_config: It, as JSON.
    """

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    @property
    def _name(self) -> str:
        return str(self._model_config["name"])

    def as_dict(self) -> dict[str, Any]:
        """Returns the configuration."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Sets `max_batch_size`.

        Raises:
            ValueError: The configuration says a larger one.
        """
        configured = self._model_config.get("max_batch_size", 0)
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but in auto-complete-config function for model "
                f"'{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Sets `dynamic_batching`, if no scheduler is set.

        Raises:
            ValueError: Another scheduler is set.
        """
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{scheduler}', but auto-complete-config function "
                    f"for model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, Any]) -> None:
        """Adds an input, or completes the one of that name.

        Args:
            input: `name`, `data_type` (such as `TYPE_FP32`), `dims`, and maybe `optional`.

        Raises:
            ValueError: A property is missing, unknown, or contradicts the configuration.
        """
        self._add("input", input, (*_REQUIRED, "optional"))

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Adds an output, or completes the one of that name.

        Args:
            output: `name`, `data_type` and `dims`.

        Raises:
            ValueError: As `add_input`.
        """
        self._add("output", output, _REQUIRED)

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Sets `model_transaction_policy`.

        Raises:
            ValueError: It has another property than `decoupled`, or contradicts the configuration.
        """
        for key in transaction_policy_dict:
            if key != "decoupled":
                raise ValueError(
                    f"model transaction property in auto-complete-config function for model '{self._name}' contains "
                    "property other than 'decoupled'."
                )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        wanted = transaction_policy_dict["decoupled"]
        if policy.setdefault("decoupled", wanted) != wanted:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model '{self._name}', which is "
                f"already set to '{policy['decoupled']}'."
            )

    def _add(self, kind: str, added: Mapping[str, Any], known: tuple[str, ...]) -> None:
        where = f"in auto-complete-config function for model '{self._name}'"
        for key in added:
            if key not in known:
                listed = ", ".join(f"'{k}'" for k in known[:-1])
                raise ValueError(
                    f"{kind} '{added.get('name', '')}' {where} contains property other than {listed} and '{known[-1]}'."
                )
        if "name" not in added:
            raise ValueError(f"{kind} {where} is missing 'name' property.")
        for key in _REQUIRED:
            if key not in added:
                raise ValueError(f"{kind} '{added['name']}' {where} is missing '{key}' property.")
        tensors = self._model_config.setdefault(kind, [])
        for tensor in tensors:
            if tensor["name"] == added["name"]:
                self._merge(kind, tensor, added)
                return
        tensors.append({key: list(value) if key == "dims" else value for key, value in added.items()})

    def _merge(self, kind: str, tensor: dict[str, Any], added: Mapping[str, Any]) -> None:
        name, configured = added["name"], tensor.get("data_type", "TYPE_INVALID")
        if configured not in ("TYPE_INVALID", added["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {configured} for {kind} "
                f"'{name}', model provides {added['data_type']}"
            )
        for key in ("dims", "optional"):
            if key not in added:
                continue
            wanted = list(added[key]) if key == "dims" else added[key]
            has = tensor.get(key)
            if has != wanted and (has if key == "dims" else has is not None):
                raise ValueError(
                    f"model '{self._name}', tensor '{name}': the model expects {key} {wanted} but the model "
                    f"configuration specifies {key} {has}"
                )
            tensor[key] = wanted
        tensor["data_type"] = added["data_type"]
